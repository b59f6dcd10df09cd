// Preloaded into a builder: a mount where every lock is refused, as NFS without lockd refuses it.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

int flock(int fd, int operation) {
  (void)fd;
  (void)operation;
  errno = ENOLCK;
  return -1;
}

static int control(int fd, int command, void* argument) {
  if (command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW) {
    errno = ENOLCK;
    return -1;
  }
  return (int)syscall(SYS_fcntl, fd, command, argument);
}

int fcntl(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return control(fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return control(fd, command, argument);
}
