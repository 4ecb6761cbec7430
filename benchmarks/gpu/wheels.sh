#!/usr/bin/env bash
# Puts wheels of the packages that an environment with torch, Lightning and pytest may lack into a folder.
# bash benchmarks/gpu/wheels.sh FOLDER
set -euo pipefail
folder=${1:?"usage: bash benchmarks/gpu/wheels.sh FOLDER"}
python=${PYTHON:-python3}
constraints=$(dirname "$0")/../../constraints.txt
mkdir -p "$folder"

# these have no wheels, or only some for other systems
"$python" -m pip wheel --no-deps -c "$constraints" -w "$folder" antlr4-python3-runtime deepspeed==0.19.8

platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${platform}_x86_64")
done
"$python" -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  -c "$constraints" -d "$folder" hydra-core omegaconf pydantic pydantic-core annotated-types typing-inspection \
  hjson==3.1.0 httpx==0.28.1 httpcore==1.0.9
du -sh "$folder"
