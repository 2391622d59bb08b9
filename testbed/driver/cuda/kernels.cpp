// Modules, functions and launches. What a kernel does is asked of the machine, an object in Python
// with three methods: load(image), function(module, name) and launch(...).
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "api.h"
#include "device.h"
#include "memory.h"
#include "work.h"

using namespace driver;

namespace {

struct Parameter {
  size_t offset, size;
};

struct Module;
struct Function {
  Module* module;
  std::string name;
  std::vector<Parameter> parameters;
  size_t bytes;  // of all parameters
  int max_threads, static_bytes, dynamic_limit;
  unsigned cluster[3];  // in blocks
  int waits;            // whether its PTX waits for the kernel in front of it
};
struct Module {
  PyObject* code;
  int device;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

PyObject* machine = nullptr;
std::set<Module*>& modules = *new std::set<Module*>;
std::set<Function*>& functions = *new std::set<Function*>;

// The message of the exception that Python has raised, which is taken.
std::string taken_exception() {
  PyObject *kind, *value, *traceback;
  PyErr_Fetch(&kind, &value, &traceback);
  PyErr_NormalizeException(&kind, &value, &traceback);
  PyObject* const text = value ? PyObject_Str(value) : nullptr;
  const char* const bytes = text ? PyUnicode_AsUTF8(text) : nullptr;
  std::string message = bytes ? bytes : "an exception without a message";
  if (kind) message = std::string(reinterpret_cast<PyTypeObject*>(kind)->tp_name) + ": " + message;
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(kind);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return message;
}

struct Shape {
  unsigned grid[3], block[3], shared;
};

Result run_kernel(const Function& function, const Shape& shape, const std::string& parameters) {
  open_windows(function.module->device);
  const unsigned *grid = shape.grid, *block = shape.block;
  PyObject* const done = PyObject_CallMethod(
      machine, "launch", "Os(III)(III)Iy#", function.module->code, function.name.c_str(), grid[0],
      grid[1], grid[2], block[0], block[1], block[2], shape.shared, parameters.data(),
      Py_ssize_t(parameters.size()));
  if (!done) return break_device(illegal_address, taken_exception());
  Py_DECREF(done);
  return success;
}

// Copies what the arguments' addresses lead to; an address that leads nowhere is an error.
Result read_arguments(const Function& function, void** arguments, std::string& content) {
  content.assign(function.bytes, '\0');
  std::vector<iovec> to, from;
  if (!arguments && function.bytes) return refuse(invalid_value, "a launch without parameters");
  for (size_t i = 0; i < function.parameters.size(); ++i) {
    const auto& [offset, size] = function.parameters[i];
    to.push_back({content.data() + offset, size});
    from.push_back({arguments[i], size});
  }
  for (size_t at = 0; at < to.size(); at += 512) {
    const size_t count = std::min<size_t>(512, to.size() - at);
    ssize_t wanted = 0;
    for (size_t i = at; i < at + count; ++i) wanted += ssize_t(to[i].iov_len);
    if (process_vm_readv(getpid(), &to[at], count, &from[at], count, 0) != wanted)
      return refuse(invalid_value, function.name + ": fewer arguments than the " +
                                       std::to_string(function.parameters.size()) + " it takes");
  }
  return success;
}

// Arguments in one block, which says how long it is: {1, block, 2, &bytes, 0}.
Result read_packed(const Function& function, void** extra, std::string& content) {
  const char* start = nullptr;
  size_t bytes = 0;
  for (; *extra; extra += 2) {
    const auto key = reinterpret_cast<uintptr_t>(extra[0]);
    if (key == 1) start = static_cast<const char*>(extra[1]);
    else if (key == 2) bytes = *static_cast<size_t*>(extra[1]);
    else return refuse(invalid_value, "an unknown entry of a launch's `extra`");
  }
  if (bytes != function.bytes)
    return refuse(invalid_value, function.name + ": " + std::to_string(bytes) + " bytes of arguments for " +
                                     std::to_string(function.bytes) + " of parameters");
  content.assign(start, bytes);
  return success;
}

Result launch(void* handle, const Shape& shape, void* stream_handle, void** arguments, void** extra,
              bool together) {
  if (!functions.count(static_cast<Function*>(handle)))
    return refuse(invalid_handle, "no such function");
  const auto& function = *static_cast<Function*>(handle);
  Stream* const stream = stream_of(stream_handle);
  if (!stream) return refuse(invalid_handle, "no such stream");
  if (stream->device != function.module->device || stream->device != current_device())
    return refuse(invalid_handle, function.name + " belongs to another device than the stream");
  const uint64_t threads = uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
  const unsigned *grid = shape.grid, *block = shape.block;
  if (!threads || threads > 1024 || block[2] > 64 || !grid[0] || !grid[1] || !grid[2] ||
      grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535)
    return refuse(invalid_value, function.name + ": the grid or the block has no such size");
  for (int axis = 0; axis < 3; ++axis)
    if (grid[axis] % function.cluster[axis])
      return refuse(invalid_cluster_size, function.name + ": the grid is no multiple of the cluster");
  if (function.max_threads && threads > unsigned(function.max_threads))
    return refuse(invalid_value, function.name + ": more threads than __launch_bounds__ allows");
  if (shape.shared > unsigned(function.dynamic_limit) ||
      shape.shared + function.static_bytes > unsigned(max_shared_memory()))
    return refuse(invalid_value, function.name + ": more shared memory than it was allowed");
  if (together && uint64_t{grid[0]} * grid[1] * grid[2] >
                      uint64_t(multiprocessors()) * (2048 / threads))
    return refuse(too_large_to_cooperate, function.name + ": its blocks are not resident together");
  std::string content;
  const Result read = extra ? read_packed(function, extra, content)
                            : read_arguments(function, arguments, content);
  if (read) return read;
  if (!launches_run()) return success;
  return enqueue(*stream, [&function, shape, content] {
    return run_kernel(function, shape, content);
  });
}

}  // namespace

API Result cuModuleLoadData(void** module, const void* image) {
  ENTER(cuModuleLoadData);
  if (!machine) return refuse(not_supported, "no machine to run kernels on");
  PyObject* const code = PyObject_CallMethod(machine, "load", "y", static_cast<const char*>(image));
  if (!code) return refuse(invalid_image, taken_exception());
  auto* const made = new Module{code, current_device(), {}};
  modules.insert(made);
  *module = made;
  return success;
}
API Result cuModuleUnload(void* handle) {
  ENTER_EVEN_BROKEN(cuModuleUnload);
  auto* const module = static_cast<Module*>(handle);
  if (!modules.count(module)) return refuse(invalid_handle, "no such module");
  // It stays in memory: graphs may hold its functions, as finalisers may run in any order.
  modules.erase(module);
  for (auto& [name, function] : module->functions) functions.erase(function.get());
  return success;
}
API Result cuModuleGetFunction(void** function, void* handle, const char* name) {
  ENTER(cuModuleGetFunction);
  auto* const module = static_cast<Module*>(handle);
  if (!modules.count(module)) return refuse(invalid_handle, "no such module");
  auto& found = module->functions[name];
  if (!found) {
    PyObject* const facts = PyObject_CallMethod(machine, "function", "Os", module->code, name);
    if (!facts) return refuse(not_found, taken_exception());
    auto made = std::make_unique<Function>();
    made->module = module;
    made->name = name;
    PyObject* rows;
    unsigned* const cluster = made->cluster;
    if (!PyArg_ParseTuple(facts, "ii(III)pO", &made->max_threads, &made->static_bytes, &cluster[0],
                          &cluster[1], &cluster[2], &made->waits, &rows))
      return refuse(not_found, taken_exception());
    made->bytes = 0;
    for (Py_ssize_t i = 0; i < PySequence_Size(rows); ++i) {
      Py_ssize_t size = 0, alignment = 1;
      PyObject* const row = PySequence_GetItem(rows, i);
      PyArg_ParseTuple(row, "nn", &size, &alignment);
      Py_DECREF(row);
      const size_t offset = made->bytes + -made->bytes % size_t(alignment);
      made->parameters.push_back({offset, size_t(size)});
      made->bytes = offset + size_t(size);
    }
    Py_DECREF(facts);
    made->dynamic_limit = (48 << 10) - made->static_bytes;
    found = std::move(made);
  }
  functions.insert(found.get());
  *function = found.get();
  return success;
}
API Result cuFuncGetAttribute(int* value, int number, void* handle) {
  ENTER(cuFuncGetAttribute);
  if (!functions.count(static_cast<Function*>(handle)))
    return refuse(invalid_handle, "no such function");
  const auto& function = *static_cast<Function*>(handle);
  switch (number) {
    case 0: *value = function.max_threads ? function.max_threads : 1024; return success;
    case 1: *value = function.static_bytes; return success;
    case 2: case 3: case 7: *value = 0; return success;  // constant, local memory; cache
    case 4: *value = 32; return success;                 // registers
    case 5: case 6: *value = 80; return success;         // versions of the PTX and the code
    case 8: *value = function.dynamic_limit; return success;
    case 9: *value = -1; return success;                 // the shared part of the cache
    default: return refuse(invalid_value, "a function's attribute " + std::to_string(number));
  }
}
API Result cuFuncSetAttribute(void* handle, int number, int value) {
  ENTER(cuFuncSetAttribute);
  if (!functions.count(static_cast<Function*>(handle)))
    return refuse(invalid_handle, "no such function");
  auto& function = *static_cast<Function*>(handle);
  if (number == 9) return success;
  if (number != 8 || value < 0 || value + function.static_bytes > max_shared_memory())
    return refuse(invalid_value, "a function's attribute " + std::to_string(number));
  function.dynamic_limit = value;
  return success;
}
// Blocks that a multiprocessor holds at once.
static int resident(const Function& function, int threads, size_t shared) {
  const size_t all = shared + size_t(function.static_bytes);
  const int by_threads = std::min(2048 / std::max(threads, 1), 32);
  return all ? std::min(by_threads, int(size_t(max_shared_memory()) / all)) : by_threads;
}
API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* handle, int threads,
                                                       size_t shared) {
  ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  if (!functions.count(static_cast<Function*>(handle)))
    return refuse(invalid_handle, "no such function");
  *blocks = resident(*static_cast<Function*>(handle), threads, shared);
  return success;
}
API Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                          unsigned by, unsigned bz, unsigned shared, void* stream, void** arguments,
                          void** extra) {
  ENTER(cuLaunchKernel);
  return launch(function, {{gx, gy, gz}, {bx, by, bz}, shared}, stream, arguments, extra, false);
}
API Result cuLaunchCooperativeKernel(void* function, unsigned gx, unsigned gy, unsigned gz,
                                     unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                     void* stream, void** arguments) {
  ENTER(cuLaunchCooperativeKernel);
  return launch(function, {{gx, gy, gz}, {bx, by, bz}, shared}, stream, arguments, nullptr, true);
}
namespace {
struct Attribute {
  int number, padding;
  union {
    char bytes[64];
    int value;
  };
};
struct Configuration {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};
}  // namespace
API Result cuLaunchKernelEx(const Configuration* c, void* function, void** arguments, void** extra) {
  ENTER(cuLaunchKernelEx);
  bool together = false, early = false;
  for (unsigned i = 0; i < c->attribute_count; ++i) {
    const Attribute& attribute = c->attributes[i];
    if (attribute.number == 2) together = attribute.value;
    else if (attribute.number == 6) early = attribute.value;
    else if (attribute.number)
      return refuse(not_supported, "cuLaunchKernelEx: attribute " + std::to_string(attribute.number));
  }
  if (early) {
    const auto* const made = static_cast<Function*>(function);
    if (functions.count(static_cast<Function*>(function)) && !made->waits)
      return refuse(invalid_value, made->name + " starts early, and has no griddepcontrol.wait");
    const Stream* const stream = stream_of(c->stream);
    if (stream && stream->capture)
      return refuse(invalid_handle, "an early start in a capture, which some devices refuse");
  }
  Shape shape;
  std::copy(c->grid, c->grid + 3, shape.grid);
  std::copy(c->block, c->block + 3, shape.block);
  shape.shared = c->shared;
  return launch(function, shape, c->stream, arguments, extra, together);
}

// A device in parts of two multiprocessors, of which a cluster takes one.
API Result cuOccupancyMaxActiveClusters(int* clusters, void* handle, const Configuration* c) {
  ENTER(cuOccupancyMaxActiveClusters);
  if (!functions.count(static_cast<Function*>(handle)))
    return refuse(invalid_handle, "no such function");
  const auto& function = *static_cast<Function*>(handle);
  const int threads = int(c->block[0] * c->block[1] * c->block[2]);
  const int cluster = int(function.cluster[0] * function.cluster[1] * function.cluster[2]);
  *clusters = 2 * resident(function, threads, c->shared) / cluster * (multiprocessors() / 2);
  return success;
}

API void driver_use_machine(PyObject* given) {
  const Held held;
  Py_XINCREF(given);
  std::swap(machine, given);
  Py_XDECREF(given);
}
