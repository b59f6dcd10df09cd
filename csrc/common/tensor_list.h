// Many tensors as a packed table of addresses, made and checked without building an FFI object per tensor.
//
// 16,000 tensors cost 3 ms as FFI arrays. DLPack's exchange table (torch >= 2.9 offers it on torch.Tensor) fills a
// DLTensor from a Python tensor in about 40 ns without allocating or counting references; collect_addresses walks a
// list's array of object pointers with it. The caller holds the GIL and keeps the list alive.
#pragma once

#include <dlpack/dlpack.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>

namespace ds {

// Whether a tensor is laid out so that its elements fill [data, data + numel) in some order of the dimensions, each once.
// Only the plain row-major order is accepted here: the caller handles other dense orders before it packs.
inline bool is_contiguous(const DLTensor& t) {
  if (t.strides == nullptr) return true;
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return true;
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

inline int64_t element_count(const DLTensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.ndim; ++i) n *= t.shape[i];
  return n;
}

// Writes the address of each tensor of a Python list into `out` and says whether anything moved.
//
// Args (addresses as integers):
//   exchange: the DLPackExchangeAPI of torch.Tensor.
//   items: PyObject* [n], each exactly a torch.Tensor or None where `none` equals it.
//   none: the address of None, written as 0.
//   counts: int64 [n], the elements each tensor must have.
//   dtype: code * 256 + bits every tensor must have.  device: type * 65536 + index every tensor must be on.
//   out: int64 [n], the last addresses; updated.
// Returns -1 where no address changed, -2 where some did, and i >= 0 where tensor i is not contiguous, or has another
// dtype, device or number of elements (out is then half updated: the caller packs anew).
inline int64_t collect_addresses(int64_t exchange, int64_t items, int64_t none, int64_t n, int64_t counts,
                                 int64_t dtype, int64_t device, int64_t out) {
  const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(exchange);
  auto* const* objects = reinterpret_cast<void* const*>(items);
  const auto* numel = reinterpret_cast<const int64_t*>(counts);
  auto* addresses = reinterpret_cast<int64_t*>(out);
  int64_t moved = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t address = 0;
    if (reinterpret_cast<int64_t>(objects[i]) != none) {
      DLTensor t;
      if (api->dltensor_from_py_object_no_sync(objects[i], &t) != 0) return i;
      const int64_t found_dtype = t.dtype.code * 256 + t.dtype.bits;
      const int64_t found_device = static_cast<int64_t>(t.device.device_type) * 65536 + t.device.device_id;
      if (found_dtype != dtype || found_device != device || element_count(t) != numel[i] || !is_contiguous(t)) return i;
      address = reinterpret_cast<int64_t>(t.data) + static_cast<int64_t>(t.byte_offset);
    }
    moved |= address ^ addresses[i];
    addresses[i] = address;
  }
  return moved ? -2 : -1;
}

}  // namespace ds
