// Generators and storages of the devices, and whether PyTorch is to see the devices at all.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>

namespace pretend {

extern std::atomic<bool> shown;

at::Generator& default_generator(int device);  // < 0: the current device's
void grow(c10::StorageImpl* storage, size_t nbytes);

}  // namespace pretend
