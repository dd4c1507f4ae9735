// Devices as PyTorch asks for them: current ones, their streams, events and generators, and which there are at all.
#include "devices.h"

#include "memory.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace pretend {

std::atomic<bool> shown{false};

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Index = c10::DeviceIndex;

  static Mark& mark(void* event) { return *static_cast<Mark*>(event); }

  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(KIND, Index(current_device)); }
  void setDevice(Device device) const override { current_device = number_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Index deviceCount() const noexcept override { return Index(device_count()); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  c10::Stream getStream(Device device) const override { return as_c10(current_stream(number_of(device))); }
  c10::Stream getDefaultStream(Device device) const override { return as_c10(default_stream(number_of(device))); }
  c10::Stream getNewStream(Device device, int) const override { return as_c10(new_stream(number_of(device))); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return passed(newest(stream_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(newest(stream_of(stream))); }
  void synchronizeDevice(const Index device) const override {
    for (auto* stream : std::vector<Stream*>(streams_of(device))) wait_for(newest(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_allocator().recordStream(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, const Index, const c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    mark(*event) = ask(stream_of(stream), [] {});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) follow(stream_of(stream), mark(event));
  }
  bool queryEvent(void* event) const override { return !event || passed(mark(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(mark(event));
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* start, void* end, const Index) const override {
    TORCH_CHECK(passed(mark(start)) && passed(mark(end)), "elapsed_time of events that are not over yet");
    return std::chrono::duration<double, std::milli>(mark(end).due - mark(start).due).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The CPU's generator under another name: operations take its state to the CPU's and back.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(KIND, c10::DeviceIndex(device));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return shown && device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return shown; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(shown ? device_count() : 0); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = number_of({KIND, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(shown, "pin_memory=True requires an accelerator, and the pretend one is hidden");
    return &pinned_allocator();
  }
  at::Device getDeviceFromPtr(void* address) const override {
    return at::Device(KIND, c10::DeviceIndex(device_of(address)));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    grow(storage.unsafeGetStorageImpl(), nbytes);
  }
};
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

at::Generator& default_generator(int device) {
  static auto& made = *[] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) generators->push_back(at::make_generator<Generator>(i));
    return generators;
  }();
  return made.at(device < 0 ? current_device : device);
}

void grow(c10::StorageImpl* storage, size_t nbytes) {
  int device = number_of(storage->device());
  c10::DeviceGuard guard(c10::Device(KIND, c10::DeviceIndex(device)));
  auto fresh = device_allocator().allocate(nbytes);
  size_t kept = std::min(nbytes, storage->nbytes());
  if (kept) {
    char *to = readable(fresh.get()), *from = readable(storage->mutable_data());
    ask(current_stream(device), [=] { memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

}  // namespace pretend
