// What the Python side calls, as operators of PyTorch's: loading the library is all the binding there is.
#include "devices.h"
#include "memory.h"
#include "streams.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/library.h>

namespace pretend {
namespace {

using at::Tensor;

Tensor import_storage(at::IntArrayRef told) {
  size_t nbytes = 0;
  auto memory = import_memory(told.vec(), &nbytes);
  auto device = memory.device();
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(memory), &device_allocator(), false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<uint8_t>());
  made.unsafeGetTensorImpl()->set_sizes_contiguous({int64_t(nbytes)});
  TORCH_INTERNAL_ASSERT(made.device() == device);
  return made;
}

TORCH_LIBRARY(pretend, m) {
  m.def("show(bool on) -> ()", [](bool on) { shown = on; });
  m.def("is_shown() -> bool", [] { return bool(shown); });
  m.def("device_count() -> int", [] { return int64_t(device_count()); });
  m.def("physical_number(int device) -> int", [](int64_t device) { return int64_t(physical_number(int(device))); });
  m.def("set_late_ms(int ms) -> ()", [](int64_t ms) {
    Lock lock;
    late_ms = int(ms);
    if (device_count() && !in_forked_child()) ask(default_stream(0), [] {});  // so that the other thread looks again
  });
  m.def("set_copy_bandwidth(float bytes_per_s) -> ()", [](double value) { copy_bandwidth = value; });
  m.def("set_kernel_ms(float ms) -> ()", [](double ms) { kernel_seconds = ms * 1e-3; });
  m.def("unfinished(int device) -> int", [](int64_t device) { return int64_t(unfinished(int(device))); });
  m.def("in_forked_child() -> bool", [] { return in_forked_child(); });

  m.def("manual_seed(int device, int seed) -> ()",
        [](int64_t device, int64_t seed) { default_generator(int(device)).set_current_seed(uint64_t(seed)); });
  m.def("initial_seed(int device) -> int",
        [](int64_t device) { return int64_t(default_generator(int(device)).current_seed()); });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) { return default_generator(int(device)).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t device, const Tensor& state) { default_generator(int(device)).set_state(state); });

  m.def("host_alias(int address) -> int",
        [](int64_t address) { return reinterpret_cast<int64_t>(readable(reinterpret_cast<void*>(address))); });
  m.def("host_register(int address, int nbytes) -> ()",
        [](int64_t address, int64_t nbytes) { pin(reinterpret_cast<char*>(address), size_t(nbytes)); });
  m.def("host_unregister(int address) -> ()", [](int64_t address) { unpin(reinterpret_cast<char*>(address)); });
  m.def("export_memory(int address, int nbytes) -> int[]", [](int64_t address, int64_t nbytes) {
    return export_memory(reinterpret_cast<void*>(address), size_t(nbytes));
  });
  m.def("import_memory(int[] told) -> Tensor", &import_storage);
}

}  // namespace
}  // namespace pretend
