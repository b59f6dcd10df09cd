// call_async_io RUNTIME OP: the portable backend writes and reads a file at odd places, and names what fails.
#include <cstddef>

#include "ffi_call.h"

namespace {

// csrc/async_io/export.h
struct QueueArgs {
  int64_t block, depth, lanes, single_submit, backend;
};
struct Outcome {
  int64_t code, at, moved;
  char call[256];
};
struct FileArgs {
  int64_t path, descriptor, write, direct, file, is_direct, alignment, memory_alignment;
  Outcome outcome;
};
struct RequestArgs {
  int64_t queue, file, write, data, bytes, offset, sync, device, stream;
  Outcome outcome;
};

TVMFFIAny address(const void* p) { return proof::integer(static_cast<int64_t>(reinterpret_cast<intptr_t>(p))); }
int64_t number(const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); }

int64_t open_file(const proof::Op& op, const std::string& path, bool write, Outcome* outcome) {
  FileArgs args = {};
  args.path = number(path.c_str());
  args.write = write;
  args.direct = 1;
  op.call("open_file", {address(&args)});
  *outcome = args.outcome;
  return args.file;
}

Outcome move(const proof::Op& op, int64_t queue, const std::string& path, bool write, std::vector<char>& data, int64_t offset,
             bool wait) {
  RequestArgs args = {};
  args.queue = queue;
  args.file = open_file(op, path, write, &args.outcome);
  if (args.outcome.code != 0) return args.outcome;
  args.write = write;
  args.data = number(data.data());
  args.bytes = static_cast<int64_t>(data.size());
  args.offset = offset;
  args.sync = write;
  args.device = -1;
  if (wait) {
    const int64_t ticket = op.call("start_request", {address(&args)}).v_int64;
    op.call("close_file", {proof::integer(args.file)});
    if (ticket != 0) op.call("finish_request", {proof::integer(queue), proof::integer(ticket), address(&args.outcome)});
  } else {
    op.call("run_request", {address(&args)});
    op.call("close_file", {proof::integer(args.file)});
  }
  return args.outcome;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) proof::fail("call_async_io RUNTIME OP");
  const proof::Op op(argv[1], argv[2]);
#if defined(_WIN32)
  const char* temporary = std::getenv("TEMP");
#else
  const char* temporary = std::getenv("TMPDIR");
#endif
  const std::string path = std::string(temporary != nullptr ? temporary : "/tmp") + "/call_async_io.bin";
  std::remove(path.c_str());
  Outcome outcome = {};
  open_file(op, path, false, &outcome);
  std::printf("missing: code %d\n", static_cast<int>(outcome.code));
  for (const int64_t lanes : {1, 4}) {
    const QueueArgs queue_args = {4096, 8, lanes, 0, 1};
    const int64_t queue = op.call("open_queue", {address(&queue_args)}).v_int64;
    std::printf("backend %s\n", proof::to_text(op.call("queue_backend", {proof::integer(queue)})).c_str());
    for (const int64_t bytes : {1, 4095, 100003}) {
      for (const int64_t offset : {0, 1, 5000}) {
        std::vector<char> sent(static_cast<size_t>(bytes)), got(sent.size()), whole;
        for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 31 % 251);
        const Outcome wrote = move(op, queue, path, true, sent, offset, offset != 0);
        const Outcome read = move(op, queue, path, false, got, offset, offset == 0);
        if (sent != got) proof::fail("other bytes came back");
        std::printf("%d at %d: %d %d, %016llx\n", static_cast<int>(bytes), static_cast<int>(offset), static_cast<int>(wrote.moved),
                    static_cast<int>(read.moved), static_cast<unsigned long long>(proof::digest(got.data(), got.size())));
      }
    }
    std::vector<char> more(200000);
    const Outcome cut = move(op, queue, path, false, more, 0, false);
    std::printf("short: code %d at %d\n", static_cast<int>(cut.code), static_cast<int>(cut.at));
    op.call("close_queue", {proof::integer(queue)});
    TVMFFIAny result;
    std::printf("closed: %s\n", op.try_call("queue_backend", {proof::integer(queue)}, &result).c_str());
  }
  std::remove(path.c_str());
}
