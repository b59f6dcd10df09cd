// An open file as the lanes use it: one descriptor for direct I/O where the file system has it, one for buffered I/O, and
// the alignment that direct I/O asks for. POSIX and Windows; nothing above this file knows which.
//
// Opening for writing creates the file (mode 0600) and never truncates. Whether a file system does direct I/O is found out
// by trying: the open, what statx says about this very file, and, last, a transfer that comes back with EINVAL.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <atomic>
#include <memory>
#include <string>

#if defined(_WIN32)
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#endif

namespace ds {
namespace aio {

#if defined(_WIN32)
using Descriptor = intptr_t;  // a HANDLE
#else
using Descriptor = int;
#endif
constexpr Descriptor kNoDescriptor = -1;

// What went wrong: an errno, the call, and where in the file.
struct Failure {
  int64_t code = 0;
  int64_t at = -1;
  std::string call;
  explicit operator bool() const { return code != 0; }
};

// The widest unit that staging buffers are made for: the largest page of any system.
constexpr int64_t kMostAlignment = 64 << 10;

// Not an errno of the system: the file ends before the bytes that were asked for.
constexpr int64_t kShortFile = -1;

#if defined(_WIN32)
inline int errno_of_windows() {
  switch (GetLastError()) {
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND: return ENOENT;
    case ERROR_ACCESS_DENIED:
    case ERROR_SHARING_VIOLATION:
    case ERROR_WRITE_PROTECT: return EACCES;
    case ERROR_DISK_FULL:
    case ERROR_HANDLE_DISK_FULL: return ENOSPC;
    case ERROR_INVALID_PARAMETER:
    case ERROR_NEGATIVE_SEEK: return EINVAL;
    case ERROR_INVALID_HANDLE: return EBADF;
    case ERROR_FILE_TOO_LARGE: return EFBIG;
    case ERROR_NOT_ENOUGH_MEMORY: return ENOMEM;
    default: return EIO;
  }
}

inline int64_t page_bytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return static_cast<int64_t>(info.dwPageSize);
}
#else
inline int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}
#endif

// One positioned transfer: bytes moved (0 at the end of the file), or a negative errno.
inline int64_t transfer_once(Descriptor fd, bool write, char* data, int64_t bytes, int64_t offset) {
#if defined(_WIN32)
  OVERLAPPED where = {};
  where.Offset = static_cast<DWORD>(offset & 0xffffffff);
  where.OffsetHigh = static_cast<DWORD>(offset >> 32);
  const DWORD ask = static_cast<DWORD>(bytes < (1 << 30) ? bytes : (1 << 30));
  DWORD moved = 0;
  const HANDLE handle = reinterpret_cast<HANDLE>(fd);
  const BOOL ok = write ? WriteFile(handle, data, ask, &moved, &where) : ReadFile(handle, data, ask, &moved, &where);
  if (ok) return static_cast<int64_t>(moved);
  return GetLastError() == ERROR_HANDLE_EOF ? 0 : -errno_of_windows();
#else
  const ssize_t moved = write ? pwrite(fd, data, static_cast<size_t>(bytes), static_cast<off_t>(offset))
                              : pread(fd, data, static_cast<size_t>(bytes), static_cast<off_t>(offset));
  return moved >= 0 ? static_cast<int64_t>(moved) : -errno;
#endif
}

class File {
 public:
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    close_one(direct_);
    if (buffered_ != direct_) close_one(buffered_);
  }

  bool writable() const { return write_; }
  // Whether direct I/O is worth trying; falls once a transfer was refused for its form.
  bool direct() const { return direct_works_.load(std::memory_order_relaxed); }
  void refuse_direct() {
    if (buffered_ != kNoDescriptor) direct_works_.store(false, std::memory_order_relaxed);
  }
  bool has_buffered() const { return buffered_ != kNoDescriptor; }
  Descriptor direct_fd() const { return direct_; }
  Descriptor buffered_fd() const { return buffered_ != kNoDescriptor ? buffered_ : direct_; }
  // Positions and lengths of direct transfers are multiples of this; at least a page, so that buffered edges and direct
  // blocks never share a page of the page cache.
  int64_t alignment() const { return alignment_; }
  int64_t memory_alignment() const { return memory_alignment_; }

#if defined(_WIN32)
  // Bytes in the file, or a negative errno.
  int64_t size() const {
    LARGE_INTEGER size;
    return GetFileSizeEx(reinterpret_cast<HANDLE>(buffered_), &size) ? static_cast<int64_t>(size.QuadPart)
                                                                     : -errno_of_windows();
  }
  int sync() const { return FlushFileBuffers(reinterpret_cast<HANDLE>(buffered_)) ? 0 : errno_of_windows(); }

  static std::shared_ptr<File> open(const char* path, bool write, bool, Failure* failure) {
    std::wstring wide(static_cast<size_t>(MultiByteToWideChar(CP_UTF8, 0, path, -1, nullptr, 0)), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, path, -1, &wide[0], static_cast<int>(wide.size()));
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const HANDLE handle = CreateFileW(wide.c_str(), write ? GENERIC_WRITE : GENERIC_READ, share, nullptr,
                                      write ? OPEN_ALWAYS : OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
    if (handle == INVALID_HANDLE_VALUE) return fail(failure, errno_of_windows(), "CreateFileW");
    std::shared_ptr<File> file(new File(write));
    file->buffered_ = reinterpret_cast<Descriptor>(handle);
    return file;
  }

  static std::shared_ptr<File> of_descriptor(Descriptor given, bool write, bool, Failure* failure) {
    HANDLE own = nullptr;
    if (!DuplicateHandle(GetCurrentProcess(), reinterpret_cast<HANDLE>(given), GetCurrentProcess(), &own, 0, FALSE,
                         DUPLICATE_SAME_ACCESS)) {
      return fail(failure, errno_of_windows(), "DuplicateHandle");
    }
    std::shared_ptr<File> file(new File(write));
    file->buffered_ = reinterpret_cast<Descriptor>(own);
    return file;
  }
#else
  int64_t size() const {
    struct stat about;
    if (fstat(buffered_fd(), &about) != 0) return -errno;
    if (S_ISREG(about.st_mode)) return static_cast<int64_t>(about.st_size);
    const off_t end = lseek(buffered_fd(), 0, SEEK_END);  // a block device
    return end >= 0 ? static_cast<int64_t>(end) : -errno;
  }
  int sync() const {
#if defined(F_FULLFSYNC)
    if (fcntl(buffered_fd(), F_FULLFSYNC) == 0) return 0;
#endif
    return fsync(buffered_fd()) == 0 ? 0 : errno;
  }

  // `direct`: whether to try direct I/O at all.
  static std::shared_ptr<File> open(const char* path, bool write, bool direct, Failure* failure) {
    // O_NONBLOCK: a pipe without a reader must not hold us; it means nothing for what we accept below.
    const int flags = (write ? O_WRONLY | O_CREAT : O_RDONLY) | O_CLOEXEC | O_NONBLOCK;
    std::shared_ptr<File> file(new File(write));
    file->buffered_ = open_retrying(path, flags);
    if (file->buffered_ < 0) return fail(failure, errno, "open");
    if (!acceptable(file->buffered_, write, failure)) return nullptr;
    if (direct) file->find_direct(path, write);
    return file;
  }

  // A file that the caller has open: our own descriptors of it, so that the caller may close his at any time.
  static std::shared_ptr<File> of_descriptor(Descriptor given, bool write, bool direct, Failure* failure) {
    const int flags = fcntl(given, F_GETFL);
    if (flags < 0) return fail(failure, errno, "fcntl");
    const int access = flags & O_ACCMODE;
    if (access != O_RDWR && access != (write ? O_WRONLY : O_RDONLY)) return fail(failure, EBADF, "fcntl");
    if (write && (flags & O_APPEND)) return fail(failure, EINVAL, "pwrite with O_APPEND");  // it would ignore the position
    if (!acceptable(given, write, failure)) return nullptr;
    const int own = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return fail(failure, errno, "fcntl");
    std::shared_ptr<File> file(new File(write));
#if defined(__linux__)
    const std::string link = "/proc/self/fd/" + std::to_string(own);
    if (flags & O_DIRECT) {  // the caller's descriptor is direct: edges need one that is not
      file->direct_ = own;
      file->buffered_ = open_retrying(link.c_str(), (write ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
      file->find_alignment();
      return file;
    }
    file->buffered_ = own;
    if (direct) file->find_direct(link.c_str(), write);
#else
    file->buffered_ = own;
#endif
    return file;
  }
#endif

 private:
  explicit File(bool write) : write_(write) {}

  static std::shared_ptr<File> fail(Failure* failure, int code, const char* call) {
    failure->code = code;
    failure->call = call;
    return nullptr;
  }

#if defined(_WIN32)
  static void close_one(Descriptor fd) {
    if (fd != kNoDescriptor) CloseHandle(reinterpret_cast<HANDLE>(fd));
  }
#else
  static void close_one(Descriptor fd) {
    if (fd != kNoDescriptor) close(fd);
  }

  static int open_retrying(const char* path, int flags) {
    int fd;
    do {
      fd = ::open(path, flags, 0600);
    } while (fd < 0 && errno == EINTR);
    return fd;
  }

  // A regular file or a block device; anything else has no positions to read from.
  static bool acceptable(int fd, bool write, Failure* failure) {
    struct stat about;
    if (fstat(fd, &about) != 0) return fail(failure, errno, "fstat"), false;
    if (S_ISDIR(about.st_mode)) return fail(failure, EISDIR, write ? "pwrite" : "pread"), false;
    if (S_ISREG(about.st_mode) || S_ISBLK(about.st_mode)) return true;
    return fail(failure, ESPIPE, write ? "pwrite" : "pread"), false;
  }

  void find_direct(const char* path, bool write) {
#if defined(__linux__)
    // Without O_CREAT: what is opened again is what is open, or nothing.
    direct_ = open_retrying(path, (write ? O_WRONLY : O_RDONLY) | O_CLOEXEC | O_DIRECT);
    if (direct_ < 0) {
      direct_ = kNoDescriptor;
      return;
    }
    struct stat one, other;
    if (fstat(direct_, &one) != 0 || fstat(buffered_, &other) != 0 || one.st_ino != other.st_ino ||
        one.st_dev != other.st_dev) {  // somebody renamed another file over it in between
      close_one(direct_);
      direct_ = kNoDescriptor;
      return;
    }
    find_alignment();
#else
    (void)path, (void)write;
#endif
  }

#if defined(__linux__)
  // statx's STATX_DIOALIGN (Linux 6.1) by offsets in its structure, which is the kernel's ABI: build hosts are older.
  void find_alignment() {
    constexpr unsigned kDioAlign = 0x2000, kEmptyPath = 0x1000;
    alignas(8) unsigned char answer[256] = {};
    uint32_t mask = 0, memory = 0, offset = 0;
    if (syscall(SYS_statx, direct_, "", kEmptyPath, kDioAlign, answer) == 0) {
      std::memcpy(&mask, answer, 4);
      std::memcpy(&memory, answer + 152, 4);
      std::memcpy(&offset, answer + 156, 4);
    }
    const bool said = (mask & kDioAlign) != 0;
    if (said && offset == 0) {
      // The file system takes the flag and does not mean it (tmpfs).
      if (buffered_ != kNoDescriptor) {
        close_one(direct_);
        direct_ = kNoDescriptor;
        return;
      }
    }
    while (said && alignment_ < static_cast<int64_t>(offset)) alignment_ *= 2;
    if (alignment_ > kMostAlignment && buffered_ != kNoDescriptor) return;
    memory_alignment_ = said && memory != 0 ? static_cast<int64_t>(memory) : 4096;
    direct_works_.store(true, std::memory_order_relaxed);
  }
#endif
#endif

  const bool write_;
  Descriptor direct_ = kNoDescriptor, buffered_ = kNoDescriptor;
  int64_t alignment_ = page_bytes(), memory_alignment_ = 1;
  std::atomic<bool> direct_works_{false};
};

}  // namespace aio
}  // namespace ds
