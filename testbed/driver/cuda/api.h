// Common parts of all calls of the driver: result codes, the lock, counts and failures on request.
//
// The interpreter's lock is the driver's own: kernels run in Python, and whoever waits for the
// device must not keep it from running.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace driver {

// CUresult, whose numbers are those of cudaError_t too.
enum Result : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  no_context = 201,
  invalid_handle = 400,
  illegal_state = 401,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  peer_already_enabled = 704,
  peer_not_enabled = 705,
  host_already_registered = 712,
  host_not_registered = 713,
  launch_failed = 719,
  too_large_to_cooperate = 720,
  not_supported = 801,
  capture_unsupported = 900,
  capture_invalidated = 901,
  capture_unmatched = 903,
  capture_unjoined = 904,
  capture_isolation = 905,
  capture_implicit = 906,
  captured_event = 907,
  invalid_cluster_size = 912,
};

class Held {
 public:
  Held() : state_(PyGILState_Ensure()) {}
  ~Held() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// The count of a function's calls, and the call at which it is to fail, and with what.
struct Calls {
  explicit Calls(const char* name);
  Result enter();
  const char* name;
  long count = 0;
  long fails_at = 0, fails = 0;  // the first call that fails, and how many do
  Result failure = success;
};

// An error of the device that every later call returns too, as CUDA's illegal address does.
Result broken();
// The same, or that no context is current in this thread, without which most calls are refused.
Result unusable();
Result break_device(Result code, std::string message);
// An error of this call alone, with why.
Result refuse(Result code, std::string message);
const std::string& last_message();

}  // namespace driver

#define ENTER_EVEN_BROKEN(name)            \
  static driver::Calls calls{#name};       \
  const driver::Held held;                 \
  if (Result planned = calls.enter()) return planned
#define ENTER(name)        \
  ENTER_EVEN_BROKEN(name); \
  if (Result before = driver::unusable()) return before
