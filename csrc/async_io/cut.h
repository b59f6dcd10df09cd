// How a request is cut into transfers. Pure arithmetic over positions in the file; tests walk it without any I/O.
//
// Direct I/O wants position, length and address aligned. What is not:
//   * a write's head or tail that is part of an alignment unit is written through the page cache, which changes just these
//     bytes. Reading the unit, changing it and writing it back would undo what another request writes beside it.
//     The unit is at least a page, so no page holds both buffered and direct bytes of one request;
//   * a read's head or tail is read directly as a whole unit into a staging buffer, and the part asked for is copied out;
//   * an address that is not aligned, or lies on a GPU, goes through a staging buffer, aligned in the file all the same.
#pragma once

#include <cstdint>

namespace ds {
namespace aio {

struct Layout {
  bool write = false;
  bool direct = false;           // direct I/O can be done on the file
  bool device = false;           // memory that the kernel cannot read or write
  int64_t alignment = 1;         // of positions and lengths
  int64_t memory_alignment = 1;  // of addresses
  int64_t address = 0;           // of the byte at position 0 of the file, were it in memory
  int64_t block = 0;             // most bytes of one transfer, a multiple of `alignment` if direct
  int64_t stage = 0;             // size of a staging buffer, a multiple of `alignment` if direct
};

struct Cut {
  int64_t begin = 0, end = 0;  // positions asked for
  int64_t from = 0, to = 0;    // positions transferred: equal to the above, or for a read's edge more
  bool direct = false;
  bool staged = false;
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The next transfer of what is left, [position, end); end > position.
inline Cut next_cut(const Layout& layout, int64_t position, int64_t end) {
  if (!layout.direct) {
    const int64_t stop = position + smaller(end - position, layout.device ? smaller(layout.block, layout.stage) : layout.block);
    return {position, stop, position, stop, false, layout.device};
  }
  const int64_t down = position - position % layout.alignment;
  if (position != down || end - position < layout.alignment) {
    const int64_t stop = smaller(end, down + layout.alignment);
    if (layout.write) return {position, stop, position, stop, false, layout.device};
    return {position, stop, down, down + layout.alignment, true, true};
  }
  const int64_t whole = (end - position) - (end - position) % layout.alignment;
  const bool staged = layout.device || (layout.address + position) % layout.memory_alignment != 0;
  const int64_t stop = position + smaller(whole, staged ? smaller(layout.block, layout.stage) : layout.block);
  return {position, stop, position, stop, true, staged};
}

}  // namespace aio
}  // namespace ds
