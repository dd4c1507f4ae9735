// Streams: queues of work that the device works off as late as it may.
//
// A task runs when something waits for it, or (late_ms >= 0) that many milliseconds after it ends by the stream's own
// clock. A copy to the host has two steps: the device reads its memory in the stream's order, but the bytes arrive at
// the host only when the host itself waits, or late. So a forgotten wait shows every time, not only under load.
//
// Durations: each stream has a clock of its own, `free_at`, that says when its newest task ends. Work that takes time
// moves it on; a stream that waits for another one moves its own to there. The host that waits sleeps until then.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace pretend {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Work = std::function<void()>;

struct Task {
  uint64_t number;
  Time due;
  Work run;
};

struct Stream {
  int device;
  int64_t id;
  uint64_t asked = 0;         // number of its newest task
  uint64_t done = 0;          // number of the newest task that ran
  Time free_at{};             // when the newest task ends
  const Task* running = nullptr;
  std::deque<Task> queue;     // tasks that did not run yet, oldest first
  std::deque<Task> arrivals;  // copies to the host that the host does not see yet
};

// A point in a stream: behind its task `number`, which ends at `due`.
struct Mark {
  Stream* stream;
  uint64_t number;
  Time due;
};

// One lock for all streams and memory. What tasks refer to (host tensors, which may belong to Python) is dropped only
// after the outermost Lock of a thread: dropping it may take Python's own lock, whose holder may wait for this one.
struct Lock {
  Lock();
  ~Lock();
};

// Knobs. late_ms < 0: only a wait makes work run. No bandwidth: copies take no time.
extern std::atomic<int> late_ms;
extern std::atomic<double> copy_bandwidth;  // bytes per second between host and device
extern std::atomic<double> kernel_seconds;  // what one operation on the device takes

// Devices: the numbers that this process knows them by, and those that they have on the machine.
int device_count();
int physical_number(int device);
int number_of(c10::Device device);  // the current one where `device` has no index; throws where there is none
bool in_forked_child();
void require_usable();              // throws in a forked child
extern thread_local int current_device;

int environment(const char* name, int otherwise);
double environment(const char* name, double otherwise);

Stream* current_stream(int device);
Stream* stream_of(c10::Stream stream);
Stream* default_stream(int device);
Stream* new_stream(int device);
void set_current_stream(c10::Stream stream);
const std::vector<Stream*>& streams_of(int device);  // under a Lock
c10::Stream as_c10(const Stream* stream);

// What streams are asked, by the host
Mark ask(Stream* stream, Work work, double seconds = 0);
void spend(Stream* stream, double seconds);  // the next task starts that much later
Mark newest(Stream* stream);
void follow(Stream* stream, Mark mark);      // what is asked of `stream` from now on comes after the mark

// Inside a task that copies to the host: `work` writes the host's memory when the host may see it.
void arrive(Stream* stream, Work work);

// Inside a task that reads pinned memory of the host: everything that comes before it on its stream has arrived there.
void see_earlier(Stream* stream);

void run_to(Mark mark);   // the device gets there; the host sees nothing of it
void wait_for(Mark mark); // the host waits, sees what arrived, and is told of what failed in the background
bool passed(Mark mark);   // whether the host would not have to wait
size_t unfinished(int device);

}  // namespace pretend
