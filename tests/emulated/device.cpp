// A device emulated on the host. It computes at once, with the CPU's kernels; what it emulates is order.
//
// Operators, copies and collectives are put on streams. Every access of a stream to the device's memory is compared with
// the ones before it by vector clocks (Mattern 1989; as race detectors of threads do, e.g. Flanagan and Freund, FastTrack,
// PLDI 2009, section 2). Two accesses, one of which writes, that no event, wait or synchronisation puts in order are a race,
// however they came out this time: on a device either may be the first. So a run finds a wait that is missing whatever the
// timing, which a test with sleeps on a real device does for the orders that it happens to provoke.
//
// Memory is given out and taken back in the order of the stream that it is allocated on; another that uses it must wait.
// It is cut from segments by the rules of torch's caching allocator for CUDA, so that it fragments as there.
//
// Where the host takes part, values are late: what is copied to pinned memory without blocking is not there (but bytes
// 0xFF, a NaN) until the host has synchronised with the copy, or the device copies it on; and pinned memory must not change
// until a copy from it is known to be done. Memory that is free holds 0xFF.
//
// Not emulated: kernels of the device's own (fused optimizers, graphs), and more than one device. The host's
// threads are one to it: what one has waited for all know. Memory is one thing a block, of which streams that use different
// parts must wait for each other too. A collective that blocks is on its communicator's stream, as others are.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace {

using at::Tensor;
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int STREAMS = 512;  // as on a device they come from a pool, and are handed out anew when it has been through
constexpr int POISON = 0xFF;

// ---------------------------------------------------------------------------------------------------- what is in order

// For each stream, how many of its operations are known to be done.
using Clock = std::array<uint64_t, STREAMS>;

void merge(Clock& clock, const Clock& other) {
  for (int i = 0; i < STREAMS; ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Operation {
  int stream = -1;  // none
  uint64_t number = 0;
  bool known_to(const Clock& clock) const { return stream < 0 || clock[stream] >= number; }
};

struct Block {
  char* start;
  size_t size;
  int stream;  // that it was allocated on
  Operation written;
  std::map<int, uint64_t> reads;  // since then, the last of each stream
  std::set<int> recorded;         // streams that are said to use it
};

struct ToHost {  // a copy that has been made, of which the host does not know yet
  Operation operation;
  Tensor to;
  std::vector<char> bytes;
};

struct FromHost {
  Operation operation;
  Tensor from, as_it_was;
};

std::recursive_mutex mutex;
thread_local int locked = 0;
thread_local std::vector<Tensor> released;

// Guards all state below. A tensor that Python knows must not be let go of (nor taken) while it is held: that takes
// Python's lock, which another thread may hold that waits for this one. So they go to `released`.
struct Lock {
  Lock() {
    mutex.lock();
    ++locked;
  }
  ~Lock() {
    bool last = --locked == 0;
    mutex.unlock();
    if (last) auto now = std::exchange(released, {});
  }
};

std::vector<Clock> clocks(STREAMS, Clock{});
Clock host{};
std::map<char*, Block> blocks;
std::map<char*, size_t> pinned;
std::list<ToHost> leaving;
std::list<FromHost> arriving;
std::vector<std::string> races;
std::string ignored;  // the waits that do nothing
int next_stream = 1;
size_t in_use = 0, peak = 0;
thread_local int current_stream = 0;
thread_local int in_kernel = 0;
thread_local std::string current_operator;

Operation begin(int stream) {
  merge(clocks[stream], host);
  return {stream, ++clocks[stream][stream]};
}

template <class Value>
Value* containing(std::map<char*, Value>& map, const void* address, size_t (*size)(const Value&)) {
  auto it = map.upper_bound((char*)address);
  if (it == map.begin()) return nullptr;
  --it;
  return (char*)address < it->first + size(it->second) ? &it->second : nullptr;
}

Block* block_of(const void* address) {
  return containing<Block>(blocks, address, [](const Block& block) { return block.size; });
}

bool is_pinned(const void* address) {
  Lock lock;
  return containing<size_t>(pinned, address, [](const size_t& size) { return size; }) != nullptr;
}

std::string described(const char* what, const Block& block, int stream, int other) {
  std::ostringstream text;
  text << what << ": " << current_operator << " on stream " << stream << ", a block of " << block.size
       << " bytes that stream " << block.stream << " allocated, not in order with stream " << other;
  return text.str();
}

void access(const void* address, Operation operation, bool writes) {
  Block* block = block_of(address);
  if (block == nullptr) return;
  const Clock& known = clocks[operation.stream];
  if (!block->written.known_to(known))
    races.push_back(
        described(writes ? "write after write" : "read after write", *block, operation.stream, block->written.stream));
  if (!writes) {
    block->reads[operation.stream] = operation.number;
    return;
  }
  for (auto [stream, number] : block->reads)
    if (!Operation{stream, number}.known_to(known))
      races.push_back(described("write after read", *block, operation.stream, stream));
  block->reads.clear();
  block->written = operation;
}

void arrive(ToHost& copy) {
  std::memcpy(copy.to.data_ptr(), copy.bytes.data(), copy.bytes.size());
  released.push_back(std::move(copy.to));
}

void retire(FromHost& copy) {
  if (std::memcmp(copy.from.data_ptr(), copy.as_it_was.data_ptr(), copy.from.nbytes()) != 0)
    races.push_back("pinned memory changed while a copy from it could still read it");
  released.push_back(std::move(copy.from));
}

bool overlap(const Tensor& one, const Tensor& other) {  // bytes from the first element to the last
  auto end = [](const Tensor& tensor) {
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return (char*)tensor.data_ptr() + (last + 1) * tensor.element_size();
  };
  return (char*)one.data_ptr() < end(other) && (char*)other.data_ptr() < end(one);
}

// The host has waited for all of this.
void synchronize(const Clock& clock) {
  merge(host, clock);
  leaving.remove_if([](ToHost& copy) {
    if (!copy.operation.known_to(host)) return false;
    arrive(copy);
    return true;
  });
  arriving.remove_if([](FromHost& copy) {
    if (!copy.operation.known_to(host)) return false;
    retire(copy);
    return true;
  });
}

// -------------------------------------------------------------------------------------------------------------- memory

// A count and its peak.
struct Gauge {
  size_t now = 0, peak = 0;
  void add(int64_t bytes) { peak = std::max(peak, now += bytes); }
};

// Segments that are divided, as c10/cuda/CUDACachingAllocator.cpp does it: of the free pieces of the same kind the smallest
// that suffices is taken, what is left of it is cut off, and neighbours are joined when they are free.
class Segments {
 public:
  Gauge allocated, reserved, inactive_split;  // the last: free pieces of segments that are in use elsewhere
  bool expandable = false;  // each kind has one segment, which grows
  size_t limit = SIZE_MAX, retries = 0;  // of what is reserved; how often all unused segments were given back for it

  char* take(size_t size, int pool, int stream) {
    bool small = size <= SMALL;
    Kind kind{pool, stream, small};
    auto it = free.lower_bound({kind, size, nullptr});
    if (it == free.end() || std::get<0>(*it) != kind) it = free.insert(segment(kind, size)).first;
    char* start = std::get<2>(*it);
    free.erase(it);
    Piece& piece = pieces.at(start);
    piece.is_free = false;
    size_t rest = piece.size - size;
    if (small || piece.grows ? rest >= 512 : rest > SMALL) {
      pieces[start + size] = {rest, piece.segment, kind, true, piece.grows};
      free.insert({kind, rest, start + size});
      piece.size = size;
    }
    if (piece.grows) {
      std::memset(start, POISON, size);
      size_t step = small ? 2 << 20 : 20 << 20;
      size_t mapped = (start + piece.size - piece.segment + step - 1) / step * step;
      if (mapped > grown[piece.segment]) reserved.add(mapped - std::exchange(grown[piece.segment], mapped));
    }
    allocated.add(piece.size);
    count_inactive();
    return start;
  }

  void give(char* start) {
    auto it = pieces.find(start);
    allocated.add(-(int64_t)it->second.size);
    it->second.is_free = true;
    if (it != pieces.begin()) it = joined(std::prev(it), it);
    if (std::next(it) != pieces.end()) joined(it, std::next(it));
    free.insert({it->second.kind, it->second.size, it->first});
    count_inactive();
  }

  // Gives back segments that nothing uses, and forgets peaks.
  void empty() {
    give_back();
    count_inactive();
    for (Gauge* gauge : {&allocated, &reserved, &inactive_split}) gauge->peak = gauge->now;
    retries = 0;
  }

 private:
  void give_back() {
    for (auto it = pieces.begin(); it != pieces.end();) {
      auto next = std::next(it);
      const Piece& piece = it->second;
      if (piece.is_free && is_whole(it)) {
        free.erase({piece.kind, piece.size, it->first});
        if (piece.grows) {
          reserved.add(-(int64_t)grown[piece.segment]);
          grown.erase(piece.segment);
          munmap(piece.segment, piece.size);
        } else {
          reserved.add(-(int64_t)piece.size);
          std::free(piece.segment);
        }
        pieces.erase(it);
      }
      it = next;
    }
  }

  static constexpr size_t SMALL = 1 << 20;
  static constexpr size_t RANGE = size_t(1) << 36;  // of addresses, of a segment that grows
  using Kind = std::tuple<int, int, bool>;  // pool, stream, whether pieces are small

  struct Piece {
    size_t size;
    char* segment;
    Kind kind;
    bool is_free;
    bool grows;
  };

  using Pieces = std::map<char*, Piece>;

  bool is_whole(Pieces::iterator it) {
    auto next = std::next(it);
    return it->first == it->second.segment && (next == pieces.end() || next->second.segment != it->second.segment);
  }

  void count_inactive() {
    size_t sum = 0;
    for (auto& [kind, size, start] : free) {
      auto it = pieces.find(start);
      if (is_whole(it)) continue;
      char *end = start + size, *segment = it->second.segment;
      if (it->second.grows) end = std::min(end, segment + grown[segment]);
      if (end > start) sum += end - start;
    }
    inactive_split.add((int64_t)sum - (int64_t)inactive_split.now);
  }

  std::tuple<Kind, size_t, char*> segment(Kind kind, size_t least) {
    size_t size = std::get<2>(kind) ? 2 << 20 : least < 10 << 20 ? 20 << 20 : (least + (2 << 20) - 1) >> 21 << 21;
    char* start;
    if (expandable) {
      size = RANGE;
      start = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(start != MAP_FAILED, "no range of addresses");
    } else {
      if (reserved.now + size > limit) {
        ++retries;
        give_back();
        TORCH_CHECK(reserved.now + size <= limit, "out of memory: ", size, " bytes");
      }
      start = (char*)std::aligned_alloc(512, size);
      TORCH_CHECK(start, "no memory for ", size, " bytes");
      std::memset(start, POISON, size);
      reserved.add(size);
    }
    pieces[start] = {size, start, kind, true, expandable};
    return {kind, size, start};
  }

  Pieces::iterator joined(Pieces::iterator one, Pieces::iterator next) {
    if (!one->second.is_free || !next->second.is_free || one->second.segment != next->second.segment) return next;
    free.erase({one->second.kind, one->second.size, one->first});
    free.erase({next->second.kind, next->second.size, next->first});
    one->second.size += next->second.size;
    pieces.erase(next);
    return one;
  }

  Pieces pieces;
  std::set<std::tuple<Kind, size_t, char*>> free;
  std::map<char*, size_t> grown;
};

Segments segments;
std::set<int> recording;  // pools into which a thread allocates
thread_local int pool = 0;

char* aligned(size_t size) {
  char* start = (char*)std::aligned_alloc(64, (size + 63) / 64 * 64);
  TORCH_CHECK(start, "no memory for ", size, " bytes");
  std::memset(start, POISON, size);
  return start;
}

void deallocate(void* address) {
  Lock lock;
  auto it = blocks.find((char*)address);
  if (it == blocks.end()) return;
  Block& block = it->second;
  // Whoever gets it next writes to it on the stream that it was allocated on, when all that streams were told so far is
  // done which are said to use it.
  Clock known = clocks[block.stream];
  merge(known, host);
  for (int stream : block.recorded) merge(known, clocks[stream]);
  auto check = [&](Operation last) {
    if (last.known_to(known)) return;
    current_operator = "nothing";
    races.push_back(described("freed while in use", block, block.stream, last.stream));
  };
  check(block.written);
  for (auto [stream, number] : block.reads) check({stream, number});
  std::memset(block.start, POISON, block.size);
  segments.give(block.start);
  in_use -= block.size;
  blocks.erase(it);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &deallocate, {DEVICE, 0}};
    Lock lock;
    size = (size + 511) / 512 * 512;
    char* start = segments.take(size, pool, current_stream);
    // Who had it before may still be at work on it, on this stream.
    blocks[start] = {start, size, current_stream, begin(current_stream)};
    peak = std::max(peak, in_use += size);
    return {start, start, &deallocate, {DEVICE, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

void unpin(void* address) {
  Lock lock;
  pinned.erase((char*)address);
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &unpin, c10::DeviceType::CPU};
    Lock lock;
    char* start = aligned(size);
    pinned[start] = size;
    return {start, start, &unpin, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

Allocator allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

// --------------------------------------------------------------------------------------------------- streams and events

int stream_of_pool() {
  if (next_stream == STREAMS) next_stream = 1;
  return next_stream++;
}

struct Event {
  Clock clock;
  int asked = 0;
  std::chrono::steady_clock::time_point recorded = std::chrono::steady_clock::now();
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, {DEVICE, 0}, id); }

  c10::DeviceType type() const override { return DEVICE; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return {DEVICE, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {DEVICE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, (int)next.id()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock;
    return stream(stream_of_pool());
  }

  void record(void** event, const c10::Stream& of, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (*event == nullptr) *event = new Event();
    *(Event*)*event = {clocks[of.id()]};
  }
  void block(void* event, const c10::Stream& waiting) const override {
    Lock lock;
    if (event != nullptr && ignored != "event") merge(clocks[waiting.id()], ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    if (event == nullptr) return true;
    auto& asked = *(Event*)event;
    Clock with = host;
    merge(with, asked.clock);
    if (with != host && ++asked.asked < 3) return false;  // it takes its time
    ::synchronize(asked.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    if (event != nullptr && ignored != "host") ::synchronize(((Event*)event)->clock);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> between = ((Event*)second)->recorded - ((Event*)first)->recorded;
    return between.count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  bool queryStream(const c10::Stream& of) const override {
    synchronizeStream(of);
    return true;
  }
  void synchronizeStream(const c10::Stream& of) const override {
    Lock lock;
    if (ignored != "host") ::synchronize(clocks[of.id()]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Lock lock;
    for (auto& clock : clocks) merge(host, clock);
    ::synchronize(host);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& using_it) const override {
    Lock lock;
    if (Block* block = block_of(data.get())) block->recorded.insert(using_it.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return {DEVICE, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocator.allocate(size);
    if (size_t kept = std::min(size, storage.nbytes())) {
      Lock lock;
      auto operation = begin(current_stream);
      access(storage.data(), operation, false);
      access(data.get(), operation, true);
      std::memcpy(data.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
Hooks hooks;
bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ----------------------------------------------------------------------------------------------------------- operators

Tensor on_host(const Tensor& tensor) {  // the same memory
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::NoGradGuard no_grad;
  if (from.numel() == 0) return to;
  bool reads = !from.device().is_cpu(), writes = !to.device().is_cpu(), late = non_blocking && !in_kernel;
  Tensor held_from = from, held_to = to;  // not under the lock, see there
  Lock lock;
  if (!in_kernel) current_operator = "copy";
  auto operation = begin(current_stream);
  const Clock& known = clocks[current_stream];

  leaving.remove_if([&](ToHost& copy) {
    if ((reads || !overlap(copy.to, from)) && (writes || !overlap(copy.to, to))) return false;
    if (!copy.operation.known_to(known)) races.push_back("a copy of pinned memory whose values have not arrived");
    arrive(copy);
    return true;
  });
  arriving.remove_if([&](FromHost& copy) {  // one that the device has made before it writes there
    if (writes || !overlap(copy.from, to) || !copy.operation.known_to(known)) return false;
    retire(copy);
    return true;
  });
  if (reads) access(from.data_ptr(), operation, false);
  if (writes) access(to.data_ptr(), operation, true);

  if (reads && !writes && late && is_pinned(to.data_ptr()) && to.is_contiguous()) {
    Tensor now = at::empty(to.sizes(), to.options().pinned_memory(false)).copy_(on_host(from));
    auto* bytes = (char*)now.data_ptr();
    leaving.push_back({operation, std::move(held_to), {bytes, bytes + now.nbytes()}});
    std::memset(to.data_ptr(), POISON, to.nbytes());
    return to;
  }
  on_host(to).copy_(on_host(from));
  bool is_staged = !reads && writes && late;  // memory that is not pinned is copied at once, by way of pinned memory
  if (is_staged && is_pinned(from.data_ptr()) && from.is_contiguous())
    arriving.push_back({operation, std::move(held_from), from.clone()});
  else if (reads != writes && !in_kernel && !is_staged)
    synchronize(known);  // the host waited
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  Lock lock;
  current_operator = "item";
  access(self.data_ptr(), begin(current_stream), false);
  synchronize(clocks[current_stream]);
  return on_host(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  Lock lock;
  if (Block* block = block_of(self.storage().data())) block->recorded.insert(stream.id());
}

// As CUDA's kernels, refuse tensors of several devices, but for numbers and indices.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string& name = op.schema().name();
  if (name == "aten::index" || name.find("index_put") != std::string::npos) return;
  bool on_host = false, on_device = false;
  auto see = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    (tensor.is_cpu() ? on_host : on_device) |= !tensor.is_cpu() || tensor.dim() > 0;
  };
  for (const auto& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    if (argument.isTensor()) see(argument.toTensor());
    if (argument.isTensorList())
      for (const Tensor& each : argument.toTensorVector()) see(each);
  }
  TORCH_CHECK(!on_host || !on_device, name, ": expected all tensors to be on the same device, but some are on the CPU");
}

// Every other operator: the CPU's kernel, whose arguments and results come and go through `copy_from` on this stream.
void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Within {
    std::string outer = current_operator;
    explicit Within(std::string name) {
      current_operator = std::move(name);
      ++in_kernel;
    }
    ~Within() {
      current_operator = outer;
      --in_kernel;
    }
  } within(op.schema().name());
  check_devices(op, *stack);
  at::native::cpu_fallback(op, stack, false);
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pin = std::optional<bool>;
using Sizes = c10::SymIntArrayRef;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(Sizes size, Dtype dtype, Layout, Device, Pin, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, Dtype dtype, Layout, Device, Pin) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, KEYS, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, Sizes size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (tensor->storage_offset() + tensor->numel()) * self.element_size();
  if (needed > tensor->storage().nbytes()) hooks.resizePrivateUse1Bytes(tensor->storage(), needed);
  return self;
}

Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, Sizes size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_to_storage_at(Tensor& self, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_to_storage(Tensor& self, at::Storage storage) {
  c10::SymInt length(storage.nbytes() / self.element_size()), one(1);
  return set_to_storage_at(self, std::move(storage), 0, {length}, {one});
}

Tensor& set_to_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_to_nothing(Tensor& self) { return set_to_tensor(self, at::empty({0}, self.options())); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("set_.source_Storage_storage_offset", &set_to_storage_at);
  m.impl("set_.source_Storage", &set_to_storage);
  m.impl("set_", &set_to_nothing);
  m.impl("is_set_to", &at::native::is_set_to);
}

// Autocast, with torch's lists of operators for CUDA.
#define LOW_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_PROMOTE(WIDEST)
}

// --------------------------------------------------------------------------------------------------------- collectives

using Handle = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

// As NCCL's: done on a stream of the communicator's own, which begins after what the current stream has been given;
// `wait` makes the stream that is then current wait, and the host for nothing but the bytes, which go over Gloo.
struct Work final : c10d::Work {
  Work(Handle bytes, Clock done, Tensors used, Tensors outputs)
      : bytes(std::move(bytes)), done(done), used(std::move(used)), outputs(std::move(outputs)) {}
  ~Work() override {  // Gloo may still write to what nobody has waited for
    if (!has_bytes) static_cast<void>(new Tensors(std::move(used)));
  }
  bool wait(std::chrono::milliseconds) override {
    {
      std::lock_guard<std::mutex> guard(once);
      if (!has_bytes) bytes->wait();
      has_bytes = true;
    }
    Lock lock;
    if (ignored != "collective") merge(clocks[current_stream], done);
    for (auto& tensor : used) released.push_back(std::move(tensor));
    used.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return has_bytes || bytes->isCompleted(); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{{DEVICE, 0}});
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(outputs));
    return future;
  }

  Handle bytes;
  Clock done;
  Tensors used, outputs;
  std::mutex once;
  bool has_bytes = false;
};

// Several transfers as one.
struct All final : c10d::Work {
  explicit All(std::vector<Handle> parts) : parts(std::move(parts)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& part : parts) part->wait(timeout);
    return true;
  }
  bool isCompleted() override {
    return std::all_of(parts.begin(), parts.end(), [](auto& part) { return part->isCompleted(); });
  }
  std::vector<Handle> parts;
};

struct Communicator final : c10d::Backend {
  explicit Communicator(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {
    Lock lock;
    stream = stream_of_pool();
  }
  const std::string getBackendName() const override { return "emulated"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  template <class Act>
  Handle run(const char* name, const Tensors& in, const Tensors& out, Act act) {
    for (auto& tensors : {in, out})
      for (auto& tensor : tensors)
        TORCH_CHECK(
            !tensor.device().is_cpu() && tensor.is_contiguous(), name, ": tensors must be contiguous and on the device");
    Clock done;
    {
      Lock lock;
      ::merge(clocks[stream], clocks[current_stream]);
      auto operation = begin(stream);
      auto outer = std::exchange(current_operator, name);
      for (auto& tensor : in)
        if (tensor.numel()) access(tensor.data_ptr(), operation, false);
      for (auto& tensor : out)
        if (tensor.numel()) access(tensor.data_ptr(), operation, true);
      current_operator = outer;
      done = clocks[stream];
    }
    Tensors used = in;
    used.insert(used.end(), out.begin(), out.end());
    return c10::make_intrusive<Work>(act(), done, std::move(used), out);
  }
  static Tensors hosts(const Tensors& tensors) {
    Tensors result;
    for (auto& tensor : tensors) result.push_back(on_host(tensor));
    return result;
  }

  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = hosts(tensors);
    return run("all-reduce", tensors, tensors, [&] { return gloo->allreduce(host, options); });
  }
  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = hosts(tensors);
    return run("broadcast", tensors, tensors, [&] { return gloo->broadcast(host, options); });
  }
  Handle _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto host_out = on_host(out), host_in = on_host(in).clone();  // `in` may be a part of `out`
    return run("all-gather", {in}, {out}, [&] { return gloo->_allgather_base(host_out, host_in, options); });
  }
  Handle allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> host_out;
    Tensors all, host_in = hosts(in);
    for (auto& tensors : out) {
      host_out.push_back(hosts(tensors));
      all.insert(all.end(), tensors.begin(), tensors.end());
    }
    return run("all-gather", in, all, [&]() -> Handle {  // a broadcast of each slice, as NCCL's if slices are unequal
      std::vector<Handle> parts;
      host_out[0][getRank()].copy_(host_in[0]);
      for (int source = 0; source < getSize(); ++source) {
        Tensors slice{host_out[0][source]};
        c10d::BroadcastOptions from;
        from.rootRank = source;
        if (slice[0].numel()) parts.push_back(gloo->broadcast(slice, from));
      }
      return c10::make_intrusive<All>(std::move(parts));
    });
  }
  Handle _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto host_out = on_host(out), host_in = on_host(in).clone();
    return run("reduce-scatter", {in}, {out}, [&] { return gloo->_reduce_scatter_base(host_out, host_in, options); });
  }
  using Sizes = std::vector<int64_t>;
  Handle alltoall_base(
      Tensor& out, Tensor& in, Sizes& out_sizes, Sizes& in_sizes, const c10d::AllToAllOptions& options) override {
    auto host_out = on_host(out), host_in = on_host(in).clone();
    return run("all-to-all", {in}, {out}, [&] {
      return gloo->alltoall_base(host_out, host_in, out_sizes, in_sizes, options);
    });
  }
  Handle send(Tensors& tensors, int to, int tag) override {
    auto host = hosts(tensors);
    return run("send", tensors, {}, [&] { return gloo->send(host, to, tag); });
  }
  Handle recv(Tensors& tensors, int from, int tag) override {
    auto host = hosts(tensors);
    return run("receive", {}, tensors, [&] { return gloo->recv(host, from, tag); });
  }
  Handle barrier(const c10d::BarrierOptions& options) override {
    return run("barrier", {}, {}, [&] { return gloo->barrier(options); });
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  int stream;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("races", [] {
    Lock lock;
    return std::exchange(races, {});
  }, "What was not in order since the last call.");
  m.def("ignore", [](std::string waits) {
    Lock lock;
    ignored = std::move(waits);
  }, "Let waits do nothing: `event` (a stream for an event), `host` (the host for a stream or event), `collective`.");
  m.def("memory", [] {
    Lock lock;
    return std::make_pair(in_use, std::exchange(peak, in_use));
  }, "Bytes that are in use, and their peak since the last call.");
  m.def("segments", [] {
    Lock lock;
    return std::make_tuple(
        segments.allocated.now, segments.allocated.peak, segments.reserved.now, segments.reserved.peak,
        segments.inactive_split.now, segments.inactive_split.peak, segments.retries);
  }, "Bytes that are allocated, of segments, and of free pieces of segments in use, each with its peak; retries.");
  m.def("limit", [](std::optional<size_t> bytes) {
    Lock lock;
    segments.limit = bytes.value_or(SIZE_MAX);
  }, "The most bytes that segments may have together, other than those that grow; None for no limit.");
  m.def("empty", [] {
    Lock lock;
    segments.empty();
  }, "Give back segments that nothing uses, and forget peaks.");
  m.def("expand_segments", [](bool expandable) {
    Lock lock;
    segments.expandable = expandable;
  }, "Whether new segments grow.");
  m.def("use_pool", [](int next) {
    Lock lock;
    TORCH_CHECK(next == 0 || recording.insert(next).second, "already recording to pool ", next);
    if (next == 0) recording.erase(pool);
    pool = next;
  }, "From now on this thread allocates from a pool; 0 for what all share.");
  m.def("communicator", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Communicator>(std::move(gloo));
  }, "A backend for the device whose bytes go over this one.");
}
