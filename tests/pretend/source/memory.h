// Memory of the device, which the CPU cannot touch; memory of the host that the device copies to and from.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <vector>

namespace pretend {

// The address at which kernels, and nobody else, read and write what tensors hold at `address`.
char* readable(const void* address);
int device_of(const void* address);  // throws where it is no device memory

bool is_pinned(const void* address);
void pin(const char* address, size_t nbytes);
void unpin(const char* address);

// What another process needs to map this memory; and mapping it there. The process it belongs to must be alive.
std::vector<int64_t> export_memory(const void* address, size_t nbytes);
c10::DataPtr import_memory(const std::vector<int64_t>& told, size_t* nbytes);

c10::DeviceAllocator& device_allocator();
at::HostAllocator& pinned_allocator();

}  // namespace pretend
