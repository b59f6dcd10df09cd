// The I/O library without Python, for sanitizers: many threads, every backend, odd sizes and addresses, verified.
//
// io_stress FOLDER ROUNDS [race|overflow]
// `race` changes a buffer while it is written, `overflow` reads past the end of one: the sanitizer has to see that, or it
// sees nothing. Prints what was done; exit code 1 where bytes differ.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "async_io/queue.h"

using namespace ds::aio;

namespace {

std::shared_ptr<Request> request(const std::string& path, bool write, char* data, int64_t bytes, int64_t offset) {
  Failure failure;
  auto made = std::make_shared<Request>();
  made->file = File::open(path.c_str(), write, true, &failure);
  if (!made->file) {
    std::fprintf(stderr, "%s: %s %lld\n", path.c_str(), failure.call.c_str(), static_cast<long long>(failure.code));
    std::exit(1);
  }
  made->write = write;
  made->data = data;
  made->bytes = bytes;
  made->offset = made->next = offset;
  return made;
}

bool worker(Queue& queue, const std::string& path, int seed, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int64_t bytes = 1 + (seed * 7919 + round * 104729) % 200000, offset = (seed + round * 513) % 9000;
    std::vector<char> sent(static_cast<size_t>(bytes) + 1), got(static_cast<size_t>(bytes) + 64, 0);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 31 + static_cast<size_t>(seed));
    char* from = sent.data() + 1;
    char* to = got.data() + round % 64;
    if (round % 2 == 0) {
      if (queue.run(request(path, true, from, bytes, offset)).failure) return false;
      const int64_t ticket = queue.start(request(path, false, to, bytes, offset));
      queue.finished(ticket);
      if (queue.finish(ticket).failure) return false;
    } else {
      const int64_t half = bytes / 2;
      const int64_t first = queue.start(request(path, true, from, half, offset));
      const int64_t second = queue.start(request(path, true, from + half, bytes - half, offset + half));
      if (queue.finish(second).failure || queue.finish(first).failure) return false;
      if (queue.run(request(path, false, to, bytes, offset)).failure) return false;
    }
    if (std::memcmp(from, to, static_cast<size_t>(bytes)) != 0) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argv[1], planted = argc > 3 ? argv[3] : "";
  const int rounds = std::atoi(argv[2]);
  long done = 0;
  for (const Backend backend : kBackends) {
    if (!try_backend(backend).works) continue;
    for (const int64_t lanes : {1, 3}) {
      Queue::Options options;
      options.block = lanes == 1 ? 4096 : 65536;
      options.depth = 8;
      options.lanes = lanes;
      options.single_submit = lanes == 3;
      options.backend = backend;
      Queue queue(options);
      bool good[4] = {};
      std::vector<std::thread> threads;
      for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&, i] { good[i] = worker(queue, folder + "/" + std::to_string(i), i, rounds); });
      }
      for (std::thread& thread : threads) thread.join();
      for (const bool fine : good) {
        if (!fine) return std::fprintf(stderr, "%s: bytes differ or a request failed\n", name_of(backend)), 1;
        done += rounds;
      }
      const int64_t left = queue.start(request(folder + "/left", true, new char[70001](), 70001, 3));
      (void)left;  // the destructor finishes it
    }
  }
  if (!planted.empty()) {
    Queue::Options options;
    options.backend = Backend::threads;
    Queue queue(options);
    std::vector<char> data(100001);
    const int64_t more = planted == "overflow" ? 64 : 0;
    const int64_t ticket = queue.start(request(folder + "/planted", true, data.data() + 1, 100000 + more, 0));
    for (int i = 0; planted == "race" && i < 20; ++i) {  // without touching the queue, whose lock would order us
      std::memset(data.data(), i, data.size());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    queue.finish(ticket);
  }
  std::printf("%ld rounds\n", done);
  return 0;
}
