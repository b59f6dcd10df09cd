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

// What collect_addresses reads; every field 8 bytes, filled by src/deepspeed_ops/tensor_table.py. Addresses as integers.
struct CollectArgs {
  int64_t exchange;     // DLPackExchangeAPI of torch.Tensor
  int64_t none;         // the object None: a tensor that is absent
  int64_t type_offset;  // where an object holds its type
  int64_t types[2];     // the only types accepted: exactly torch.Tensor and torch.nn.Parameter
  int64_t n;            // tensors in each list
  int64_t counts;       // int64 [n], elements each must have
  int64_t device;       // type * 65536 + index each must be on
  int64_t first_list, end_list;  // which of the lists below to read
  struct List {
    int64_t items;  // PyObject* [n]
    int64_t dtype;  // code * 256 + bits each must have
    int64_t out;    // int64 [n], the last addresses (absent: 0); updated
  } list[5];
};

// The address of one tensor, 0 where it is absent, -1 where it does not fit.
inline int64_t address_of(const CollectArgs& args, const CollectArgs::List& list, int64_t i) {
  auto* object = reinterpret_cast<char* const*>(list.items)[i];
  if (reinterpret_cast<int64_t>(object) == args.none) return 0;
  const int64_t type = *reinterpret_cast<const int64_t*>(object + args.type_offset);
  if (type != args.types[0] && type != args.types[1]) return -1;
  DLTensor t;
  const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(args.exchange);
  if (api->dltensor_from_py_object_no_sync(object, &t) != 0) return -1;
  const int64_t dtype = t.dtype.code * 256 + t.dtype.bits;
  const int64_t device = static_cast<int64_t>(t.device.device_type) * 65536 + t.device.device_id;
  const int64_t count = reinterpret_cast<const int64_t*>(args.counts)[i];
  if (dtype != list.dtype || device != args.device || element_count(t) != count || !is_contiguous(t)) return -1;
  // One element out of a larger tensor can be lazily negated (the imaginary part of a conjugate), which a DLTensor does not
  // say; a larger such view is strided anyway. No memory at all: freed by a sharding engine, or torch's lazy zeros.
  for (int d = 0; count == 1 && d < t.ndim; ++d) {
    if (t.strides != nullptr && t.strides[d] != 1) return -1;
  }
  const int64_t found = reinterpret_cast<int64_t>(t.data) + static_cast<int64_t>(t.byte_offset);
  return found == 0 && count > 0 ? -1 : found;
}

constexpr int64_t kAbsent = 1 << 8;

// Writes the addresses of up to five lists of Python tensors and says what moved. Arg: address of CollectArgs.
//
// The caller holds the GIL (the exchange function takes it again for each tensor: helper threads would deadlock, and did)
// and keeps the lists alive.
// Returns a bit per list in which an address changed and kAbsent where a gradient was None, or -1 - (list * n + i) for the
// first tensor that is of another type, dtype, device or size, or not row-major contiguous; the outputs are then half
// updated and the caller packs anew.
inline int64_t collect_addresses(int64_t address) {
  const auto& args = *reinterpret_cast<const CollectArgs*>(address);
  int64_t moved = 0, absent = 0;
  for (int64_t l = args.first_list; l < args.end_list; ++l) {
    const CollectArgs::List& list = args.list[l];
    auto* out = reinterpret_cast<int64_t*>(list.out);
    int64_t difference = 0;
    for (int64_t i = 0; i < args.n; ++i) {
      const int64_t now = address_of(args, list, i);
      if (l == 1 && now == 0 && reinterpret_cast<const int64_t*>(list.items)[i] == args.none) absent = kAbsent;
      if (now == -1) return -1 - (l * args.n + i);
      difference |= now ^ out[i];
      out[i] = now;
    }
    if (difference != 0) moved |= int64_t{1} << l;
  }
  return moved | absent;
}

}  // namespace ds
