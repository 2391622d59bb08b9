#include "work.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <set>

#include "device.h"
#include "memory.h"

namespace driver {
namespace {

// Never destroyed, so that the work which nobody waited for is not either when the process ends.
std::vector<Stream*>& streams = *new std::vector<Stream*>;  // in the order of their creation
std::set<Event*>& events = *new std::set<Event*>;
std::set<Graph*>& graphs = *new std::set<Graph*>;
std::set<Graph*>& executables = *new std::set<Graph*>;
std::map<int, Stream*>& legacy_streams = *new std::map<int, Stream*>;
std::map<std::pair<int, unsigned long>, Stream*>& thread_streams =
    *new std::map<std::pair<int, unsigned long>, Stream*>;
std::vector<std::pair<int, WorkPtr>>& left_behind = *new std::vector<std::pair<int, WorkPtr>>;
bool is_running = false;
unsigned long runner = 0;  // the thread that runs work

double now() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

unsigned long this_thread() { return PyThread_get_thread_ident(); }

Stream* add_stream(Stream stream) {
  streams.push_back(new Stream(std::move(stream)));
  return streams.back();
}

template <class T>
bool has(const std::set<T*>& all, void* one) {
  return all.count(static_cast<T*>(one));
}

bool is_eager() {
  static const char* chosen = getenv("TESTBED_DRIVER_SCHEDULE");
  return chosen && std::string(chosen) == "eager";
}

void invalidate(Capture& capture) { capture.invalid = true; }

// Whoever asks again and again waits: then the work is run.
Result asked(const WorkPtr& work) {
  if (!work || work->done) return broken();
  return ++work->asked < 1000 ? not_ready : run(work);
}

}  // namespace

Stream* stream_of(void* handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  const int device = current_device();
  if (number <= 1) {
    Stream*& stream = legacy_streams[device];
    if (!stream) stream = add_stream({device, false, true, nullptr, nullptr, {}});
    return stream;
  }
  if (number == 2) {
    Stream*& stream = thread_streams[{device, this_thread()}];
    if (!stream) stream = add_stream({device, true, false, nullptr, nullptr, {}});
    return stream;
  }
  auto* const found = static_cast<Stream*>(handle);
  return std::find(streams.begin(), streams.end(), found) == streams.end() ? nullptr : found;
}

Result enqueue(Stream& stream, Action action) {
  if (stream.capture) {
    if (stream.capture->invalid) return refuse(capture_invalidated, "the capture is invalid");
    auto& nodes = *stream.capture->graph->nodes;
    nodes.push_back({stream.frontier, std::move(action)});
    stream.frontier = {int(nodes.size()) - 1};
    return success;
  }
  auto work = std::make_shared<Work>();
  work->action = std::move(action);
  auto behind = [&](const WorkPtr& other) {
    if (other && !other->done) work->before.push_back(other);
  };
  behind(stream.last);
  for (Stream* other : streams) {
    if (other->device != stream.device || other == &stream) continue;
    if (stream.legacy && other->blocking && other->capture) {
      invalidate(*other->capture);
      return refuse(capture_implicit, "the legacy stream waits for a stream that is captured");
    }
    if (stream.legacy ? other->blocking : stream.blocking && other->legacy) behind(other->last);
  }
  stream.last = work;
  return is_eager() && !is_running ? run(work) : success;
}

bool running() { return is_running; }

Result run(const WorkPtr& wanted) {
  // A finaliser that a kernel's launch sets off does not wait; another thread does.
  while (is_running && runner != this_thread()) {
    PyThreadState* const released = PyEval_SaveThread();
    usleep(50);
    PyEval_RestoreThread(released);
  }
  if (!wanted || is_running) return broken();
  is_running = true;
  runner = this_thread();
  PyObject *kind, *value, *traceback;  // a finaliser may come here while an exception is raised
  PyErr_Fetch(&kind, &value, &traceback);
  std::vector<WorkPtr> stack{wanted};
  while (!stack.empty()) {
    const WorkPtr work = stack.back();
    const size_t depth = stack.size();
    if (!work->done)
      for (const WorkPtr& other : work->before)
        if (!other->done) stack.push_back(other);
    if (stack.size() != depth) continue;
    stack.pop_back();
    if (work->done) continue;
    const Action action = std::move(work->action);
    work->action = nullptr;
    if (action && !broken()) action();
    work->done = true;
    work->finished = now();
    work->before.clear();
  }
  PyErr_Restore(kind, value, traceback);
  is_running = false;
  return broken();
}

Result run_stream(Stream& stream) {
  const WorkPtr last = stream.last;
  if (stream.legacy)
    for (Stream* other : std::vector<Stream*>(streams))
      if (other->device == stream.device && other->blocking) run(other->last);
  return run(last);
}

Result run_device(int device) {
  // The newest stream first: nothing orders it behind the others.
  const std::vector<Stream*> all(streams);
  for (auto stream = all.rbegin(); stream != all.rend(); ++stream)
    if ((*stream)->device == device) run((*stream)->last);
  auto left = std::move(left_behind);
  left_behind.clear();
  for (auto& [where, work] : left) {
    if (where == device) run(work);
    if (where != device || !work->done) left_behind.push_back({where, work});
  }
  return broken();
}

Result forbidden_in_capture() {
  for (Stream* stream : streams) {
    if (!stream->capture || stream->capture->mode == 2) continue;
    if (stream->capture->mode == 1 && stream->capture->thread != this_thread()) continue;
    invalidate(*stream->capture);
    return refuse(capture_unsupported, "a capture forbids this call");
  }
  return success;
}

}  // namespace driver

using namespace driver;

#define STREAM_OR_REFUSE(stream, handle)                                           \
  Stream* const stream = stream_of(handle);                                        \
  if (!stream) return refuse(invalid_handle, "no such stream")
#define EVENT_OR_REFUSE(event, handle)                                             \
  if (!has(events, handle)) return refuse(invalid_handle, "no such event");        \
  auto& event = *static_cast<Event*>(handle)

// Streams

API Result cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  ENTER(cuStreamCreateWithPriority);
  (void)priority;
  if (flags > 1) return refuse(invalid_value, "flags of cuStreamCreate");
  *stream = add_stream({current_device(), flags == 0, false, nullptr, nullptr, {}});
  return success;
}
API Result cuStreamCreate(void** stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}
API Result cuStreamDestroy_v2(void* handle) {
  ENTER_EVEN_BROKEN(cuStreamDestroy_v2);
  STREAM_OR_REFUSE(stream, handle);
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return refuse(invalid_handle, "a default stream");
  if (stream->capture) invalidate(*stream->capture);
  if (stream->last && !stream->last->done) left_behind.push_back({stream->device, stream->last});
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  delete stream;
  return success;
}
API Result cuStreamSynchronize(void* handle) {
  ENTER(cuStreamSynchronize);
  STREAM_OR_REFUSE(stream, handle);
  if (stream->capture) {
    invalidate(*stream->capture);
    return refuse(capture_unsupported, "cuStreamSynchronize of a stream that is captured");
  }
  return run_stream(*stream);
}
API Result cuStreamQuery(void* handle) {
  ENTER(cuStreamQuery);
  STREAM_OR_REFUSE(stream, handle);
  if (stream->capture) {
    invalidate(*stream->capture);
    return refuse(capture_unsupported, "cuStreamQuery of a stream that is captured");
  }
  return asked(stream->last);
}
API Result cuStreamGetCtx(void* handle, void** context) {
  ENTER(cuStreamGetCtx);
  STREAM_OR_REFUSE(stream, handle);
  *context = reinterpret_cast<void*>(uintptr_t(stream->device) + 1);
  return success;
}
API Result cuStreamGetFlags(void* handle, unsigned* flags) {
  ENTER(cuStreamGetFlags);
  STREAM_OR_REFUSE(stream, handle);
  *flags = !stream->blocking && !stream->legacy;
  return success;
}
API Result cuStreamGetPriority(void* handle, int* priority) {
  ENTER(cuStreamGetPriority);
  STREAM_OR_REFUSE(stream, handle);
  (void)stream;
  *priority = 0;
  return success;
}
API Result cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  ENTER(cuStreamWaitEvent);
  STREAM_OR_REFUSE(stream, handle);
  EVENT_OR_REFUSE(event, event_handle);
  if (event.capture) {
    if (stream->legacy || (stream->capture && stream->capture != event.capture)) {
      invalidate(*event.capture);
      return refuse(capture_isolation, "a stream waits for an event of another capture");
    }
    if (!stream->capture) stream->frontier.clear();
    stream->capture = event.capture;
    stream->frontier.insert(stream->frontier.end(), event.frontier.begin(), event.frontier.end());
    return success;
  }
  if (stream->capture) {
    if (!event.work) return success;
    invalidate(*stream->capture);
    return refuse(capture_isolation, "a captured stream waits for what is not captured");
  }
  if (!event.work || event.work->done) return success;
  const WorkPtr awaited = event.work;
  if (Result error = enqueue(*stream, nullptr)) return error;
  if (!stream->last->done) stream->last->before.push_back(awaited);
  return success;
}
API Result cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  ENTER(cuLaunchHostFunc);
  STREAM_OR_REFUSE(stream, handle);
  return enqueue(*stream, [=] {
    function(argument);
    return success;
  });
}

// Events

API Result cuEventCreate(void** event, unsigned flags) {
  ENTER(cuEventCreate);
  auto* const made = new Event{current_device(), !(flags & 2), nullptr, nullptr, {}};
  events.insert(made);
  *event = made;
  return success;
}
API Result cuEventDestroy_v2(void* handle) {
  ENTER_EVEN_BROKEN(cuEventDestroy_v2);
  EVENT_OR_REFUSE(event, handle);
  events.erase(&event);
  delete &event;
  return success;
}
API Result cuEventRecord(void* handle, void* stream_handle) {
  ENTER(cuEventRecord);
  STREAM_OR_REFUSE(stream, stream_handle);
  EVENT_OR_REFUSE(event, handle);
  if (event.device != stream->device)
    return refuse(invalid_handle, "an event and a stream of different devices");
  event.capture = stream->capture;
  if (stream->capture) {
    event.frontier = stream->frontier;
    return success;
  }
  if (Result error = enqueue(*stream, nullptr)) return error;
  event.work = stream->last;
  return success;
}
API Result cuEventQuery(void* handle) {
  ENTER(cuEventQuery);
  EVENT_OR_REFUSE(event, handle);
  if (event.capture) return refuse(captured_event, "cuEventQuery of an event that is captured");
  return asked(event.work);
}
API Result cuEventSynchronize(void* handle) {
  ENTER(cuEventSynchronize);
  EVENT_OR_REFUSE(event, handle);
  if (event.capture) return refuse(captured_event, "cuEventSynchronize of a captured event");
  return run(event.work);
}
API Result cuEventElapsedTime(float* milliseconds, void* first, void* second) {
  ENTER(cuEventElapsedTime);
  EVENT_OR_REFUSE(start, first);
  EVENT_OR_REFUSE(stop, second);
  if (!start.timed || !stop.timed || !start.work || !stop.work)
    return refuse(invalid_handle, "an event without a time");
  if (!start.work->done || !stop.work->done) return not_ready;
  *milliseconds = float(stop.work->finished - start.work->finished);
  return success;
}

// Graphs

API Result cuStreamBeginCapture_v2(void* handle, int mode) {
  ENTER(cuStreamBeginCapture_v2);
  STREAM_OR_REFUSE(stream, handle);
  if (stream->legacy) return refuse(capture_unsupported, "the legacy stream is never captured");
  if (stream->capture) return refuse(illegal_state, "the stream is being captured already");
  auto* const graph = new Graph;
  graphs.insert(graph);
  stream->frontier.clear();
  stream->capture = std::make_shared<Capture>(Capture{graph, stream, mode, this_thread()});
  return success;
}
API Result cuStreamIsCapturing(void* handle, int* status) {
  ENTER(cuStreamIsCapturing);
  STREAM_OR_REFUSE(stream, handle);
  for (Stream* other : streams)
    if (stream->legacy && other->device == stream->device && other->blocking && other->capture)
      return refuse(capture_implicit, "the legacy stream waits for a stream that is captured");
  *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
  return success;
}
API Result cuStreamEndCapture(void* handle, void** graph) {
  ENTER(cuStreamEndCapture);
  STREAM_OR_REFUSE(stream, handle);
  const CapturePtr capture = stream->capture;
  *graph = nullptr;
  if (!capture) return refuse(illegal_state, "the stream is not being captured");
  if (capture->origin != stream) return refuse(capture_unmatched, "the capture began elsewhere");
  std::set<int> joined;
  std::vector<int> open = stream->frontier;
  while (!open.empty()) {
    const int node = open.back();
    open.pop_back();
    if (!joined.insert(node).second) continue;
    const auto& before = (*capture->graph->nodes)[node].before;
    open.insert(open.end(), before.begin(), before.end());
  }
  bool unjoined = false;
  for (Stream* other : streams) {
    if (other->capture != capture) continue;
    for (int node : other->frontier) unjoined |= !joined.count(node);
    other->capture = nullptr;
  }
  if (capture->invalid) return refuse(capture_invalidated, "the capture is invalid");
  if (unjoined) return refuse(capture_unjoined, "a stream that was forked did not join again");
  *graph = capture->graph;
  return success;
}
API Result cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  ENTER(cuGraphInstantiateWithFlags);
  if (!has(graphs, graph)) return refuse(invalid_value, "no such graph");
  auto* const made = new Graph(*static_cast<Graph*>(graph));
  executables.insert(made);
  *executable = made;
  return success;
}
API Result cuGraphUpload(void* executable, void*) {
  ENTER(cuGraphUpload);
  return has(executables, executable) ? success : refuse(invalid_value, "no such graph");
}
API Result cuGraphLaunch(void* executable, void* handle) {
  ENTER(cuGraphLaunch);
  STREAM_OR_REFUSE(stream, handle);
  if (!has(executables, executable)) return refuse(invalid_value, "no such graph");
  const auto nodes = static_cast<Graph*>(executable)->nodes;
  return enqueue(*stream, [nodes] {
    std::vector<int> waits(nodes->size());
    std::vector<std::vector<int>> after(nodes->size());
    std::set<int> ready;
    for (size_t i = 0; i < nodes->size(); ++i) {
      for (int other : (*nodes)[i].before) after[other].push_back(int(i));
      waits[i] = int((*nodes)[i].before.size());
      if (!waits[i]) ready.insert(int(i));
    }
    while (!ready.empty()) {  // what was captured last goes first where nothing orders it
      const int next = *ready.rbegin();
      ready.erase(next);
      if (Result error = (*nodes)[next].action()) return error;
      for (int other : after[next])
        if (!--waits[other]) ready.insert(other);
    }
    return success;
  });
}
API Result cuGraphDestroy(void* graph) {
  ENTER_EVEN_BROKEN(cuGraphDestroy);
  if (!graphs.erase(static_cast<Graph*>(graph))) return refuse(invalid_value, "no such graph");
  delete static_cast<Graph*>(graph);
  return success;
}
API Result cuGraphExecDestroy(void* executable) {
  ENTER_EVEN_BROKEN(cuGraphExecDestroy);
  if (!executables.erase(static_cast<Graph*>(executable)))
    return refuse(invalid_value, "no such graph");
  delete static_cast<Graph*>(executable);
  return success;
}

// Copies

namespace {

Result enqueue_copy(uintptr_t to, uintptr_t from, size_t size, Stream& stream, bool wait) {
  Kind target, source;
  if (Result error = place(to, size, target)) return error;
  if (Result error = place(from, size, source)) return error;
  if (!size) return success;
  const bool captured = bool(stream.capture);
  if (source == Kind::pageable && !captured) {  // CUDA has read it when the call returns
    auto bytes = std::make_shared<std::string>(reinterpret_cast<const char*>(from), size);
    if (Result error = enqueue(stream, [=] {
          return copy(to, reinterpret_cast<uintptr_t>(bytes->data()), bytes->size());
        }))
      return error;
  } else if (Result error = enqueue(stream, [=] { return copy(to, from, size); })) {
    return error;
  }
  const bool blocks = wait || target == Kind::pageable;
  return blocks && !captured ? run_stream(stream) : success;
}

}  // namespace

API Result cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t size, void* handle) {
  ENTER(cuMemcpyAsync);
  STREAM_OR_REFUSE(stream, handle);
  return enqueue_copy(to, from, size, *stream, false);
}
API Result cuMemcpy(uintptr_t to, uintptr_t from, size_t size) {
  ENTER(cuMemcpy);
  return enqueue_copy(to, from, size, *stream_of(nullptr), true);
}
API Result cuMemcpyPeerAsync(uintptr_t to, void* to_context, uintptr_t from, void* from_context,
                             size_t size, void* handle) {
  ENTER(cuMemcpyPeerAsync);
  STREAM_OR_REFUSE(stream, handle);
  const Allocation* const target = find(to);
  const Allocation* const source = find(from);
  auto lies = [](const Allocation* allocation, void* context) {
    return allocation && allocation->kind == Kind::device &&
           uintptr_t(allocation->device) + 1 == reinterpret_cast<uintptr_t>(context);
  };
  if (size && !(lies(target, to_context) && lies(source, from_context)))
    return refuse(invalid_value, "cuMemcpyPeer of memory that lies on another device");
  return enqueue_copy(to, from, size, *stream, false);
}
API Result cuMemsetD8Async(uintptr_t to, unsigned char value, size_t count, void* handle) {
  ENTER(cuMemsetD8Async);
  STREAM_OR_REFUSE(stream, handle);
  Kind kind;
  if (Result error = place(to, count, kind)) return error;
  return enqueue(*stream, [=] { return fill(to, count, 1, value); });
}
