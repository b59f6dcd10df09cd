// load_op RUNTIME OP FUNCTION...: loads an op's host library after the runtime and finds its functions.
#include "ffi_call.h"

int main(int argc, char** argv) {
  if (argc < 4) proof::fail("load_op RUNTIME OP FUNCTION...");
  const proof::Op op(argv[1], argv[2]);
  for (int i = 3; i < argc; ++i) {
    if (!op.has(argv[i])) proof::fail(argv[i]);
    std::printf("%s\n", argv[i]);
  }
}
