// Streams, events and graphs.
//
// Work runs as late as it may: only when the host waits for it, or when something runs that is
// ordered behind it. What lacks an order thus finds its input not yet computed, whereas on a GPU
// that is a matter of luck.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "api.h"

namespace driver {

using Action = std::function<Result()>;

struct Work {
  std::vector<std::shared_ptr<Work>> before;
  Action action;
  bool done = false;
  double finished = 0;  // in ms
  int asked = 0;        // how often the host asked whether it is done
};
using WorkPtr = std::shared_ptr<Work>;

struct Node {
  std::vector<int> before;
  Action action;
};

struct Graph {
  std::shared_ptr<std::vector<Node>> nodes = std::make_shared<std::vector<Node>>();
};

struct Stream;
struct Capture {
  Graph* graph;
  Stream* origin;
  int mode;  // 0: global, 1: of the thread, 2: relaxed
  unsigned long thread;
  bool invalid = false;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
  int device;
  bool blocking;  // is it ordered with the legacy stream?
  bool legacy;
  WorkPtr last;
  CapturePtr capture;
  std::vector<int> frontier;  // the nodes of the capture that come before what is next
};

struct Event {
  int device;
  bool timed;
  WorkPtr work;
  CapturePtr capture;
  std::vector<int> frontier;
};

// A stream of this handle; nullptr, if there is none.
Stream* stream_of(void* handle);
// Puts an action behind all work of the stream, or into the graph that it is captured into.
Result enqueue(Stream& stream, Action action);
// Runs a piece of work, and what comes before it.
Result run(const WorkPtr& work);
Result run_stream(Stream& stream);
Result run_device(int device);
bool running();
// An error if the call may not be made while something is captured; it ends the capture then.
Result forbidden_in_capture();

}  // namespace driver
