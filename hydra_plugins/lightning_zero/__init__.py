"""Found by Hydra, which imports every module of the namespace package `hydra_plugins` when an app starts."""
