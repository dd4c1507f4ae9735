#include "memory.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>

namespace pretend {
namespace {

constexpr size_t ARENA = size_t(1) << 36;  // bytes of addresses for a device; memory is only what was written
constexpr size_t GRAIN = 512;
constexpr int NOTHING = 0xFF;  // every byte of memory without a value: NaN in every floating-point type

// One file in memory, mapped twice: tensors hold addresses of the view that nobody may touch.
struct Region {
  char* closed = nullptr;
  char* open = nullptr;
  int device = 0;
  int64_t process = 0, descriptor = 0, inode = 0;  // where the file is to be found

  bool holds(const void* address) const {
    auto* at = static_cast<const char*>(address);
    return closed && at >= closed && at < closed + ARENA;
  }
};

struct Arena {
  Region region;
  size_t used = 0;                                    // bytes from its start that were ever handed out
  std::map<size_t, std::vector<char*>> free;          // by size
  c10::CachingDeviceAllocator::DeviceStats figures;
};

// None of these is ever destroyed: threads may still use them when the process ends.
std::vector<Arena>& arenas() {
  static auto& made = *new std::vector<Arena>(device_count());
  return made;
}
std::deque<Region>& imported = *new std::deque<Region>;  // mapped until the process ends
const size_t limit = size_t(environment("PRETEND_MEMORY_MIB", 4096)) << 20;

void map_twice(Region& region, int file) {
  int flags = MAP_SHARED | MAP_NORESERVE;
  void* closed = mmap(nullptr, ARENA, PROT_NONE, flags, file, 0);
  void* open = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, flags, file, 0);
  TORCH_CHECK(closed != MAP_FAILED && open != MAP_FAILED, "mapping memory of a pretend device: ", strerror(errno));
  region.closed = static_cast<char*>(closed);
  region.open = static_cast<char*>(open);
}

Arena& arena(int device) {
  Arena& found = arenas().at(device);
  if (!found.region.closed) {
    int file = memfd_create("pretend", MFD_CLOEXEC);
    struct stat about{};
    TORCH_CHECK(file >= 0 && !ftruncate(file, ARENA) && !fstat(file, &about), "memory file: ", strerror(errno));
    found.region.device = device;
    found.region.process = getpid();
    found.region.descriptor = file;  // stays open: other processes open it through /proc
    found.region.inode = int64_t(about.st_ino);
    map_twice(found.region, file);
  }
  return found;
}

const Region* region_of(const void* address) {
  for (auto& one : arenas()) {
    if (one.region.holds(address)) return &one.region;
  }
  for (auto& one : imported) {
    if (one.holds(address)) return &one;
  }
  return nullptr;
}

const Region& known_region(const void* address) {
  Lock lock;
  auto* found = region_of(address);
  TORCH_CHECK(found, "not an address of a pretend device");
  return *found;
}

struct Block {
  char* start;
  size_t taken, nbytes;  // from the arena; by the tensor
  int device;
  std::set<Stream*> streams;  // that may still use it when it is freed
};

void give_back(Block* block) {
  Lock lock;
  Arena& from = arenas()[block->device];
  memset(readable(block->start), NOTHING, block->taken);
  from.free[block->taken].push_back(block->start);
  delete block;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (in_forked_child()) return;
  Lock lock;
  auto& figures = arenas()[block->device].figures;
  figures.allocated_bytes[0].decrease(block->nbytes);
  figures.active_bytes[0].decrease(block->nbytes);
  figures.allocation[0].decrease(1);
  auto last = std::shared_ptr<Block>(block, &give_back);  // when the last of the streams has got there
  for (auto* stream : std::set<Stream*>(block->streams)) {
    ask(stream, [last] {});
  }
}

void keep(void*) {}

// A block of at least nbytes: a free one that is not much larger, else a new one.
Block* take_block(int device, size_t nbytes) {
  Arena& from = arena(device);
  size_t taken = nbytes;
  auto found = from.free.lower_bound(nbytes);
  while (found != from.free.end() && found->second.empty()) found = from.free.erase(found);
  bool again = found != from.free.end() && found->first <= nbytes + nbytes / 4;
  auto in_use = size_t(from.figures.allocated_bytes[0].current);
  if (in_use + nbytes > limit || (!again && from.used + nbytes > ARENA)) {
    ++from.figures.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "pretend device ", device, " is out of memory: tried to allocate ", nbytes,
                     " bytes, has ", limit, ", of which ", in_use, " are in use");
  }
  char* start;
  if (again) {
    taken = found->first;
    start = found->second.back();
    found->second.pop_back();
  } else {
    start = from.region.closed + from.used;
    from.used += nbytes;
    memset(readable(start), NOTHING, nbytes);
    from.figures.reserved_bytes[0].increase(nbytes);
  }
  return new Block{start, taken, nbytes, device, {current_stream(device)}};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    require_usable();
    int device = number_of(c10::Device(KIND));
    c10::Device here(KIND, c10::DeviceIndex(device));
    if (!wanted) return {nullptr, nullptr, &keep, here};
    Lock lock;
    size_t nbytes = (wanted + GRAIN - 1) / GRAIN * GRAIN;
    Block* block = take_block(device, nbytes);
    auto& figures = arenas()[device].figures;
    figures.allocated_bytes[0].increase(nbytes);
    figures.active_bytes[0].increase(nbytes);
    figures.allocation[0].increase(1);
    return {block->start, block, &free_block, here};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    memmove(readable(to), readable(from), nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    if (memory.get_deleter() != &free_block) return;  // another process' memory, which is freed there
    Lock lock;
    static_cast<Block*>(memory.get_context())->streams.insert(stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    return arena(device).figures;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock;
    arena(device).figures.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& figures = arena(device).figures;
    for (auto* one : {&figures.allocated_bytes[0], &figures.reserved_bytes[0], &figures.active_bytes[0]}) {
      one->reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock;
    return {limit - size_t(arena(device).figures.allocated_bytes[0].current), limit};
  }
};

std::map<const char*, size_t>& pins = *new std::map<const char*, size_t>;  // start and length of pinned memory

void free_pinned(void* address) {
  unpin(static_cast<char*>(address));
  free(address);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = nullptr;
    if (nbytes) {
      TORCH_CHECK(!posix_memalign(&address, 64, nbytes), "no pinned memory of ", nbytes, " bytes");
      pin(static_cast<char*>(address), nbytes);
    }
    return {address, address, &free_pinned, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies keep their host tensors
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory& the_device_memory = *new DeviceMemory;
PinnedMemory& the_pinned_memory = *new PinnedMemory;
REGISTER_ALLOCATOR(KIND, &the_device_memory);
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &the_pinned_memory);

// The process' file, opened anew through /proc, which the kernel allows between processes of one user.
const Region& region_told(const std::vector<int64_t>& told) {
  auto process = told[0], descriptor = told[1], inode = told[2];
  int device = number_of(c10::Device(KIND));
  for (auto& one : imported) {
    if (one.process == process && one.inode == inode && one.device == device) return one;
  }
  auto path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "memory of process ", process, ": ", path, ": ", strerror(errno));
  struct stat about{};
  bool same = !fstat(file, &about) && int64_t(about.st_ino) == inode;
  Region region{nullptr, nullptr, device, process, descriptor, inode};
  if (same) map_twice(region, file);
  close(file);
  TORCH_CHECK(same, "memory of process ", process, ": it has ended, or ", path, " is another file");
  imported.push_back(region);
  return imported.back();
}

}  // namespace

char* readable(const void* address) {
  auto& region = known_region(address);
  return region.open + (static_cast<const char*>(address) - region.closed);
}

int device_of(const void* address) { return known_region(address).device; }

bool is_pinned(const void* address) {
  Lock lock;
  auto* at = static_cast<const char*>(address);
  auto next = pins.upper_bound(at);
  if (next == pins.begin()) return false;
  auto [start, nbytes] = *std::prev(next);
  return at < start + nbytes;
}

void pin(const char* address, size_t nbytes) {
  Lock lock;
  TORCH_CHECK(nbytes && pins.emplace(address, nbytes).second, "memory at this address is pinned already, or empty");
}

void unpin(const char* address) {
  Lock lock;
  pins.erase(address);
}

std::vector<int64_t> export_memory(const void* address, size_t nbytes) {
  auto& region = known_region(address);
  int64_t offset = static_cast<const char*>(address) - region.closed;
  return {region.process, region.descriptor, region.inode, offset, int64_t(nbytes)};
}

c10::DataPtr import_memory(const std::vector<int64_t>& told, size_t* nbytes) {
  TORCH_CHECK(told.size() == 5 && told[3] >= 0 && told[4] >= 0 && size_t(told[3] + told[4]) <= ARENA,
              "not what export_memory() gave");
  require_usable();
  Lock lock;
  auto& region = region_told(told);
  *nbytes = size_t(told[4]);
  return {region.closed + told[3], nullptr, &keep, c10::Device(KIND, c10::DeviceIndex(region.device))};
}

c10::DeviceAllocator& device_allocator() { return the_device_memory; }

at::HostAllocator& pinned_allocator() { return the_pinned_memory; }

}  // namespace pretend
