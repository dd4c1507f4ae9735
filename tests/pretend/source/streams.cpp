#include "streams.h"

#include <c10/util/Exception.h>

#include <pthread.h>
#include <sys/prctl.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <thread>

namespace pretend {

int environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoi(value) : otherwise;
}

double environment(const char* name, double otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atof(value) : otherwise;
}

std::atomic<int> late_ms{environment("PRETEND_LATE_MS", -1)};
std::atomic<double> copy_bandwidth{environment("PRETEND_COPY_BANDWIDTH", 0.0)};
std::atomic<double> kernel_seconds{environment("PRETEND_KERNEL_MS", 0.0) * 1e-3};

namespace {

constexpr int MACHINE_DEVICES = 2;
constexpr size_t STREAMS_PER_DEVICE = 32;  // beside the default one; then they are handed out again, as on CUDA

// Like CUDA_VISIBLE_DEVICES: which devices there are for this process, in its order, up to the first that is none.
std::vector<int> visible_devices() {
  int there = environment("PRETEND_DEVICES", MACHINE_DEVICES);
  std::vector<int> found;
  const char* listed = std::getenv("PRETEND_VISIBLE_DEVICES");
  if (!listed) {
    for (int i = 0; i < there; ++i) found.push_back(i);
    return found;
  }
  std::stringstream words(listed);
  for (std::string word; std::getline(words, word, ',');) {
    char* end = nullptr;
    long number = std::strtol(word.c_str(), &end, 10);
    if (end == word.c_str() || number < 0 || number >= there) break;
    found.push_back(int(number));
  }
  return found;
}

// None of these is ever destroyed: threads may still use them when the process ends.
const std::vector<int>& visible() {
  static auto& found = *new std::vector<int>(visible_devices());
  return found;
}
std::vector<std::vector<Stream*>>& all_streams() {
  static auto& made = *new std::vector<std::vector<Stream*>>(visible().size());
  return made;
}
std::recursive_mutex& mutex = *new std::recursive_mutex;
bool forked = false;
std::string& failure = *new std::string;  // what went wrong in the background; the next wait throws it

thread_local int depth = 0;
thread_local std::vector<Task> done_with;
thread_local std::vector<int64_t> current_ids(visible().size(), 0);

// The thread that works off what is late enough. It sleeps until then, or until asked earlier.
std::mutex& wake_mutex = *new std::mutex;
std::condition_variable& wake = *new std::condition_variable;
bool woken = false;

void wake_up() {
  if (late_ms < 0) return;
  {
    std::lock_guard<std::mutex> held(wake_mutex);
    woken = true;
  }
  wake.notify_one();
}

void run_first(Stream* stream) {
  done_with.push_back(std::move(stream->queue.front()));
  stream->queue.pop_front();
  Task task = done_with.back();  // a copy: tasks that this one waits for are put there, too
  struct Running {  // also where it fails
    Stream* stream;
    const Task* before;
    uint64_t number;
    ~Running() {
      stream->running = before;
      stream->done = number;
    }
  } running{stream, std::exchange(stream->running, &task), task.number};
  task.run();
}

void see_first(Stream* stream) {
  done_with.push_back(std::move(stream->arrivals.front()));
  stream->arrivals.pop_front();
  Work work = done_with.back().run;
  work();
}

void see_to(Mark mark) {
  Lock lock;
  run_to(mark);
  auto& arrivals = mark.stream->arrivals;
  while (!arrivals.empty() && arrivals.front().number <= mark.number) see_first(mark.stream);
}

Time run_what_is_late() {  // returns when the next task is
  auto next = Clock::now() + std::chrono::minutes(1);
  if (late_ms < 0) return next;
  Lock lock;
  auto lateness = std::chrono::milliseconds(late_ms);
  for (auto& of_device : all_streams()) {
    for (auto* stream : of_device) {
      auto now = Clock::now();
      while (!stream->queue.empty() && stream->queue.front().due + lateness <= now) run_first(stream);
      while (!stream->arrivals.empty() && stream->arrivals.front().due + lateness <= now) see_first(stream);
      if (!stream->queue.empty()) next = std::min(next, stream->queue.front().due + lateness);
      if (!stream->arrivals.empty()) next = std::min(next, stream->arrivals.front().due + lateness);
    }
  }
  return next;
}

void work_in_background() {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; durations are kept to some microseconds
  for (;;) {
    Time next;
    try {
      next = run_what_is_late();
    } catch (const std::exception& error) {
      Lock lock;
      failure = error.what();
      next = Clock::now();
    }
    std::unique_lock<std::mutex> held(wake_mutex);
    wake.wait_until(held, next, [] { return woken; });
    woken = false;
  }
}

void after_fork_in_child() {
  forked = true;
  new (&mutex) std::recursive_mutex;  // whoever held it is not in this process
}

void start_once() {
  static bool started = [] {
    for (size_t i = 0; i < visible().size(); ++i) all_streams()[i].push_back(new Stream{int(i), 0});
    pthread_atfork(nullptr, nullptr, &after_fork_in_child);
    std::thread(work_in_background).detach();
    return true;
  }();
  (void)started;
}

Time after(Time start, double seconds) {
  return start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Lock::Lock() {
  mutex.lock();
  ++depth;
}

Lock::~Lock() {
  std::vector<Task> dropped;
  if (!--depth) dropped.swap(done_with);
  mutex.unlock();
}

thread_local int current_device = 0;

int device_count() { return int(visible().size()); }

int physical_number(int device) { return visible().at(device); }

int number_of(c10::Device device) {
  int number = device.index() < 0 ? current_device : device.index();
  TORCH_CHECK(number < device_count(), "there is no pretend device ", number, ": this process sees ", device_count());
  return number;
}

bool in_forked_child() { return forked; }

void require_usable() {
  TORCH_CHECK(!forked, "the pretend device cannot be used in a forked child: start the process anew");
  start_once();
}

Stream* current_stream(int device) {
  require_usable();
  Lock lock;
  return all_streams().at(device).at(current_ids.at(device));
}

Stream* stream_of(c10::Stream stream) {
  require_usable();
  Lock lock;
  return all_streams().at(number_of(stream.device())).at(stream.id());
}

Stream* default_stream(int device) {
  require_usable();
  Lock lock;
  return all_streams().at(device).front();
}

Stream* new_stream(int device) {
  require_usable();
  Lock lock;
  auto& known = all_streams().at(device);
  static size_t handed_out = 0;
  if (known.size() > STREAMS_PER_DEVICE) return known[1 + handed_out++ % STREAMS_PER_DEVICE];
  known.push_back(new Stream{device, int64_t(known.size())});
  return known.back();
}

void set_current_stream(c10::Stream stream) { current_ids.at(number_of(stream.device())) = stream.id(); }

const std::vector<Stream*>& streams_of(int device) {
  require_usable();
  return all_streams().at(device);
}

c10::Stream as_c10(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, c10::DeviceIndex(stream->device)), stream->id);
}

void spend(Stream* stream, double seconds) {
  if (seconds <= 0) return;
  Lock lock;
  stream->free_at = after(std::max(stream->free_at, Clock::now()), seconds);
}

Mark ask(Stream* stream, Work work, double seconds) {
  Lock lock;
  stream->free_at = after(std::max(stream->free_at, Clock::now()), seconds);
  stream->queue.push_back({++stream->asked, stream->free_at, std::move(work)});
  wake_up();
  return newest(stream);
}

Mark newest(Stream* stream) {
  Lock lock;
  return {stream, stream->asked, stream->free_at};
}

void follow(Stream* stream, Mark mark) {
  if (stream == mark.stream) return;
  Lock lock;
  stream->free_at = std::max(stream->free_at, mark.due);
  // a host that waits for `stream` has thereby waited for the mark, too
  ask(stream, [=] {
    run_to(mark);
    arrive(stream, [=] { see_to(mark); });
  });
}

void arrive(Stream* stream, Work work) {
  stream->arrivals.push_back({stream->running->number, stream->running->due, std::move(work)});
}

void see_earlier(Stream* stream) {
  while (!stream->arrivals.empty()) see_first(stream);
}

void run_to(Mark mark) {
  Lock lock;
  auto& queue = mark.stream->queue;
  while (!queue.empty() && queue.front().number <= mark.number) run_first(mark.stream);
}

void wait_for(Mark mark) {
  std::this_thread::sleep_until(mark.due);
  Lock lock;
  see_to(mark);
  std::string told;
  told.swap(failure);
  TORCH_CHECK(told.empty(), "an earlier operation failed on the pretend device: ", told);
}

bool passed(Mark mark) {
  if (Clock::now() < mark.due) return false;
  Lock lock;
  // a loop that asks until it is so is a wait: it must end, but not at once
  static int asked = 0;
  if (late_ms < 0 && ++asked % 64 == 0) see_to(mark);
  auto& arrivals = mark.stream->arrivals;
  return mark.stream->done >= mark.number && (arrivals.empty() || arrivals.front().number > mark.number);
}

size_t unfinished(int device) {
  Lock lock;
  size_t count = 0;
  for (auto* stream : streams_of(device)) count += stream->queue.size() + stream->arrivals.size();
  return count;
}

}  // namespace pretend
