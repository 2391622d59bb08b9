// CuPy's functions of CUDA's runtime, which is linked into CuPy, by calls of this driver.
//
// Modules of CuPy find each other's functions in capsules, whose names are the functions' types.
// The capsules made here are put into cupy_backends.cuda.api.runtime's before others look there.
#include <cstring>
#include <string>
#include <vector>

#include "api.h"
#include "device.h"
#include "memory.h"

using namespace driver;

API Result cuMemAlloc_v2(uintptr_t*, size_t);
API Result cuMemFree_v2(uintptr_t);
API Result cuMemHostAlloc(uintptr_t*, size_t, unsigned);
API Result cuMemFreeHost(uintptr_t);
API Result cuMemHostRegister_v2(uintptr_t, size_t, unsigned);
API Result cuMemHostUnregister(uintptr_t);
API Result cuMemGetInfo_v2(size_t*, size_t*);
API Result cuMemcpy(uintptr_t, uintptr_t, size_t);
API Result cuMemcpyAsync(uintptr_t, uintptr_t, size_t, void*);
API Result cuMemcpyPeerAsync(uintptr_t, void*, uintptr_t, void*, size_t, void*);
API Result cuMemsetD8Async(uintptr_t, unsigned char, size_t, void*);
API Result cuDeviceGetAttribute(int*, int, int);
API Result cuDeviceCanAccessPeer(int*, int, int);
API Result cuDeviceGetCount(int*);
API Result cuCtxEnablePeerAccess(void*, unsigned);
API Result cuCtxSetCurrent(void*);
API Result cuCtxSynchronize();
API Result cuStreamCreateWithPriority(void**, unsigned, int);
API Result cuStreamDestroy_v2(void*);
API Result cuStreamSynchronize(void*);
API Result cuStreamQuery(void*);
API Result cuStreamGetFlags(void*, unsigned*);
API Result cuStreamGetPriority(void*, int*);
API Result cuStreamWaitEvent(void*, void*, unsigned);
API Result cuLaunchHostFunc(void*, void (*)(void*), void*);
API Result cuStreamBeginCapture_v2(void*, int);
API Result cuStreamEndCapture(void*, void**);
API Result cuStreamIsCapturing(void*, int*);
API Result cuEventCreate(void**, unsigned);
API Result cuEventDestroy_v2(void*);
API Result cuEventRecord(void*, void*);
API Result cuEventQuery(void*);
API Result cuEventSynchronize(void*);
API Result cuEventElapsedTime(float*, void*, void*);
API Result cuGraphInstantiateWithFlags(void**, void*, unsigned long long);
API Result cuGraphUpload(void*, void*);
API Result cuGraphLaunch(void*, void*);
API Result cuGraphDestroy(void*);
API Result cuGraphExecDestroy(void*);

namespace {

PyObject* runtime = nullptr;  // the module cupy_backends.cuda.api.runtime

void raise(Result code) {
  const std::string why = last_message();  // before CUDA's own runtime names the error
  PyObject* const kind = PyObject_GetAttrString(runtime, "CUDARuntimeError");
  PyObject* const error = kind ? PyObject_CallFunction(kind, "i", int(code)) : nullptr;
  if (error) {
    PyObject* const text = PyObject_Str(error);
    PyObject* const arguments =
        text ? Py_BuildValue("(N)", PyUnicode_FromFormat("%U (%s)", text, why.c_str()))
             : nullptr;
    if (arguments) PyObject_SetAttrString(error, "args", arguments);
    PyErr_SetObject(kind, error);
    Py_XDECREF(arguments);
    Py_XDECREF(text);
    Py_DECREF(error);
  }
  Py_XDECREF(kind);
}
PyObject* none(Result code) {
  if (!code) Py_RETURN_NONE;
  raise(code);
  return nullptr;
}
// `value` is a reference, for the call that gives the code also sets it.
template <class T, class V>
T or_raise(Result code, const V& value, T otherwise) {
  if (!code) return (T)value;
  raise(code);
  return otherwise;
}
void* handle(intptr_t number) { return reinterpret_cast<void*>(number); }
void* context(int device) { return handle(device + 1); }

// The name of a result's type, as capsules write it.
template <class T>
constexpr const char* type_name();
template <>
constexpr const char* type_name<PyObject*>() { return "PyObject *"; }
template <>
constexpr const char* type_name<int>() { return "int"; }
template <>
constexpr const char* type_name<unsigned>() { return "unsigned int"; }
template <>
constexpr const char* type_name<float>() { return "float"; }
template <>
constexpr const char* type_name<intptr_t>() { return "intptr_t"; }
template <>
constexpr const char* type_name<size_t>() { return "size_t"; }
// Cython's: an int behind all arguments, and a structure of those that may be left out.
struct Skip {
  int value;
};
template <>
constexpr const char* type_name<Skip>() { return "int __pyx_skip_dispatch"; }
struct Optional {
  int count;
  int value;
};
template <>
constexpr const char* type_name<Optional*>() { return "struct __pyx_opt_args_"; }
struct Attributes;
template <>
constexpr const char* type_name<Attributes*>() { return "struct __pyx_obj_"; }

struct Entry {
  const char* name;
  void* function;
  std::vector<const char*> types;  // the result's, then the arguments'
};
template <class R, class... A>
Entry entry(const char* name, R (*function)(A...)) {
  return {name, reinterpret_cast<void*>(function), {type_name<R>(), type_name<A>()...}};
}

// The same of a function that makes the current device's context the thread's, as all do of CUDA's
// runtime that need one.
template <auto Function>
struct Binding;
template <class R, class... A, R (*Function)(A...)>
struct Binding<Function> {
  static R call(A... arguments) {
    has_context() = true;
    return Function(arguments...);
  }
};
template <auto Function>
Entry binding(const char* name) {
  return entry(name, Binding<Function>::call);
}

// True if a capsule's name, such as "int (int, int __pyx_skip_dispatch)", has these types.
bool same(const Entry& entry, const std::string& text) {
  auto begins = [](const std::string& found, const char* type) {
    if (!strncmp(type, "struct", 6)) return found.compare(0, strlen(type), type) == 0;
    return found == type;
  };
  const size_t open = text.rfind('(');
  std::string result = text.substr(0, open);
  while (!result.empty() && result.back() == ' ') result.pop_back();
  std::vector<std::string> found{result};
  std::string inside = text.substr(open + 1, text.size() - open - 2);
  for (size_t at = 0; inside != "void" && at <= inside.size();) {
    const size_t comma = std::min(inside.find(", ", at), inside.size());
    found.push_back(inside.substr(at, comma - at));
    at = comma + 2;
  }
  if (found.size() != entry.types.size()) return false;
  for (size_t i = 0; i < found.size(); ++i) {
    std::string wanted = entry.types[i];
    while (wanted.back() == '*' || wanted.back() == ' ') wanted.pop_back();
    std::string have = found[i];
    while (strncmp(wanted.c_str(), "struct", 6) && (have.back() == '*' || have.back() == ' '))
      have.pop_back();
    if (!begins(have, wanted.c_str())) return false;
  }
  return true;
}

// Devices

int get_device(Skip) { return current_device(); }
int get_device_count(Skip) { return device_count(); }
PyObject* set_device(int device, Skip) { return none(cuCtxSetCurrent(context(device))); }
// As CuPy's own, which remembers for each thread that it has done so.
PyObject* ensure_context() {
  static thread_local bool ensured[most_devices];
  bool& known = ensured[current_device()];
  if (!known) known = has_context() = true;
  return none(success);
}
PyObject* device_synchronize(Skip) { return none(cuCtxSynchronize()); }
int device_get_attribute(int attribute, int device, Skip) {
  int value = 0;
  return or_raise(cuDeviceGetAttribute(&value, attribute, device), value, -1);
}
int device_can_access_peer(int device, int peer, Skip) {
  int can = 0;
  return or_raise(cuDeviceCanAccessPeer(&can, device, peer), can, -1);
}
PyObject* device_enable_peer_access(int peer, Skip) {
  return none(cuCtxEnablePeerAccess(context(peer), 0));
}
PyObject* device_ensure_peer_access(int peer, Skip) {
  const Result code = cuCtxEnablePeerAccess(context(peer), 0);
  return none(code == peer_already_enabled ? success : code);
}
int driver_version(Skip) { return 13000; }
int runtime_version(Skip) { return 12090; }
PyObject* get_bus(int device, Skip) { return PyUnicode_FromFormat("0000:%02x:00.0", device); }

// Memory

intptr_t allocate_device(size_t size, Skip) {
  uintptr_t start = 0;
  return size ? or_raise<intptr_t>(cuMemAlloc_v2(&start, size), start, 0) : 0;
}
PyObject* free_device(intptr_t start, Skip) { return none(cuMemFree_v2(uintptr_t(start))); }
intptr_t allocate_host(size_t size, unsigned flags, Skip) {
  uintptr_t start = 0;
  return or_raise<intptr_t>(cuMemHostAlloc(&start, size, flags), start, 0);
}
PyObject* free_host(intptr_t start, Skip) { return none(cuMemFreeHost(uintptr_t(start))); }
PyObject* register_host(intptr_t start, size_t size, unsigned flags, Skip) {
  return none(cuMemHostRegister_v2(uintptr_t(start), size, flags));
}
PyObject* unregister_host(intptr_t start, Skip) {
  return none(cuMemHostUnregister(uintptr_t(start)));
}
PyObject* memory_info(Skip) {
  size_t left = 0, all = 0;
  if (Result code = cuMemGetInfo_v2(&left, &all)) return none(code);
  return Py_BuildValue("(nn)", Py_ssize_t(left), Py_ssize_t(all));
}
// Checks the ends of a copy by its kind: 0 host to host, 1 to the device, 2 from it, 3 within, 4 any.
Result check_kind(intptr_t to, intptr_t from, int kind) {
  const Allocation* const target = find(uintptr_t(to));
  const Allocation* const source = find(uintptr_t(from));
  const bool to_device = target && target->kind == Kind::device;
  const bool from_device = source && source->kind == Kind::device;
  if (kind == 4 || kind == 2 * from_device + to_device) return success;
  return refuse(invalid_value, "a copy whose kind " + std::to_string(kind) + " is not that of its addresses");
}
PyObject* copy_now(intptr_t to, intptr_t from, size_t size, int kind, Skip) {
  if (Result code = size ? check_kind(to, from, kind) : success) return none(code);
  return none(cuMemcpy(uintptr_t(to), uintptr_t(from), size));
}
PyObject* copy_async(intptr_t to, intptr_t from, size_t size, int kind, intptr_t stream, Skip) {
  if (Result code = size ? check_kind(to, from, kind) : success) return none(code);
  return none(cuMemcpyAsync(uintptr_t(to), uintptr_t(from), size, handle(stream)));
}
PyObject* copy_peer_async(intptr_t to, int to_device, intptr_t from, int from_device, size_t size,
                          intptr_t stream, Skip) {
  return none(cuMemcpyPeerAsync(uintptr_t(to), context(to_device), uintptr_t(from),
                                context(from_device), size, handle(stream)));
}
PyObject* copy_peer(intptr_t to, int to_device, intptr_t from, int from_device, size_t size, Skip) {
  return copy_peer_async(to, to_device, from, from_device, size, 0, {});
}
PyObject* set_async(intptr_t to, int value, size_t size, intptr_t stream, Skip) {
  return none(cuMemsetD8Async(uintptr_t(to), uint8_t(value), size, handle(stream)));
}
PyObject* set(intptr_t to, int value, size_t size, Skip) {
  return set_async(to, value, size, 0, {});
}
int type_of(intptr_t address) {
  const Allocation* const found = find(uintptr_t(address));
  return !found ? 0 : found->kind == Kind::device ? 2 : 1;
}
int get_memory_type(intptr_t address, Skip) { return type_of(address); }
Attributes* get_pointer_attributes(intptr_t address, Skip) {
  const Allocation* const found = find(uintptr_t(address));
  const int type = type_of(address);
  return reinterpret_cast<Attributes*>(PyObject_CallMethod(
      runtime, "PointerAttributes", "inni", found ? found->device : -2,
      Py_ssize_t(type ? address : 0), Py_ssize_t(type == 2 ? 0 : address), type));
}

// Streams and events

intptr_t create_stream_with_priority(unsigned flags, int priority, Skip) {
  void* stream = nullptr;
  const Result code = cuStreamCreateWithPriority(&stream, flags, priority);
  return or_raise<intptr_t>(code, stream, 0);
}
intptr_t create_stream_with_flags(unsigned flags, Skip) {
  return create_stream_with_priority(flags, 0, {});
}
intptr_t create_stream(Skip) { return create_stream_with_priority(0, 0, {}); }
PyObject* destroy_stream(intptr_t stream, Skip) { return none(cuStreamDestroy_v2(handle(stream))); }
PyObject* synchronize_stream(intptr_t stream, Skip) {
  return none(cuStreamSynchronize(handle(stream)));
}
PyObject* query_stream(intptr_t stream, Skip) {
  return PyLong_FromLong(cuStreamQuery(handle(stream)));
}
unsigned get_stream_flags(intptr_t stream, Skip) {
  unsigned flags = 0;
  return or_raise(cuStreamGetFlags(handle(stream), &flags), flags, 0u);
}
int get_stream_priority(intptr_t stream, Skip) {
  int priority = 0;
  return or_raise(cuStreamGetPriority(handle(stream), &priority), priority, 1);
}
PyObject* wait_for_event(intptr_t stream, intptr_t event, Skip, Optional*) {
  return none(cuStreamWaitEvent(handle(stream), handle(event), 0));
}
void call_host(void* given) {
  auto* const call = static_cast<PyObject*>(given);  // (function, argument)
  PyObject* const done =
      PyObject_CallOneArg(PyTuple_GetItem(call, 0), PyTuple_GetItem(call, 1));
  if (!done) PyErr_WriteUnraisable(call);
  Py_XDECREF(done);
  Py_DECREF(call);
}
PyObject* launch_host(intptr_t stream, PyObject* function, intptr_t argument, Skip) {
  auto* const passed = reinterpret_cast<PyObject*>(argument);
  PyObject* const call = PyTuple_Pack(2, function, passed ? passed : Py_None);
  return none(cuLaunchHostFunc(handle(stream), call_host, call));
}
PyObject* begin_capture(intptr_t stream, Skip, Optional* mode) {
  return none(cuStreamBeginCapture_v2(handle(stream), mode && mode->count ? mode->value : 2));
}
intptr_t end_capture(intptr_t stream, Skip) {
  void* graph = nullptr;
  return or_raise<intptr_t>(cuStreamEndCapture(handle(stream), &graph), graph, 0);
}
int is_capturing(intptr_t stream, Skip) {
  int status = 0;
  const Result code = cuStreamIsCapturing(handle(stream), &status);
  return or_raise(status == 2 ? capture_invalidated : code, status, -1);
}
intptr_t create_event_with_flags(unsigned flags, Skip) {
  void* event = nullptr;
  return or_raise<intptr_t>(cuEventCreate(&event, flags), event, 0);
}
intptr_t create_event(Skip) { return create_event_with_flags(0, {}); }
PyObject* destroy_event(intptr_t event, Skip) { return none(cuEventDestroy_v2(handle(event))); }
PyObject* record_event(intptr_t event, intptr_t stream, Skip) {
  return none(cuEventRecord(handle(event), handle(stream)));
}
PyObject* query_event(intptr_t event, Skip) { return PyLong_FromLong(cuEventQuery(handle(event))); }
PyObject* synchronize_event(intptr_t event, Skip) {
  return none(cuEventSynchronize(handle(event)));
}
float elapsed(intptr_t start, intptr_t stop, Skip) {
  float milliseconds = 0;
  const Result code = cuEventElapsedTime(&milliseconds, handle(start), handle(stop));
  return or_raise(code, milliseconds, -1.0f);
}

// Graphs

intptr_t instantiate(intptr_t graph, Skip) {
  void* made = nullptr;
  return or_raise<intptr_t>(cuGraphInstantiateWithFlags(&made, handle(graph), 0), made, 0);
}
PyObject* launch_graph(intptr_t graph, intptr_t stream, Skip) {
  return none(cuGraphLaunch(handle(graph), handle(stream)));
}
PyObject* upload_graph(intptr_t graph, intptr_t stream, Skip) {
  return none(cuGraphUpload(handle(graph), handle(stream)));
}
PyObject* destroy_graph(intptr_t graph, Skip) { return none(cuGraphDestroy(handle(graph))); }
PyObject* destroy_executable(intptr_t graph, Skip) {
  return none(cuGraphExecDestroy(handle(graph)));
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all{
      entry("getDevice", get_device),
      entry("getDeviceCount", get_device_count),
      entry("setDevice", set_device),
      entry("_ensure_context", ensure_context),
      binding<device_synchronize>("deviceSynchronize"),
      entry("deviceGetAttribute", device_get_attribute),
      entry("deviceCanAccessPeer", device_can_access_peer),
      binding<device_enable_peer_access>("deviceEnablePeerAccess"),
      binding<device_ensure_peer_access>("_deviceEnsurePeerAccess"),
      entry("deviceGetPCIBusId", get_bus),
      entry("driverGetVersion", driver_version),
      entry("runtimeGetVersion", runtime_version),
      binding<allocate_device>("malloc"),
      binding<free_device>("free"),
      binding<allocate_host>("hostAlloc"),
      binding<free_host>("freeHost"),
      binding<register_host>("hostRegister"),
      binding<unregister_host>("hostUnregister"),
      binding<memory_info>("memGetInfo"),
      binding<copy_now>("memcpy"),
      binding<copy_async>("memcpyAsync"),
      binding<copy_peer>("memcpyPeer"),
      binding<copy_peer_async>("memcpyPeerAsync"),
      binding<set>("memset"),
      binding<set_async>("memsetAsync"),
      entry("pointerGetAttributes", get_pointer_attributes),
      entry("pointerGetMemoryType", get_memory_type),
      binding<create_stream>("streamCreate"),
      binding<create_stream_with_flags>("streamCreateWithFlags"),
      binding<create_stream_with_priority>("streamCreateWithPriority"),
      binding<destroy_stream>("streamDestroy"),
      binding<synchronize_stream>("streamSynchronize"),
      binding<query_stream>("streamQuery"),
      binding<get_stream_flags>("streamGetFlags"),
      binding<get_stream_priority>("streamGetPriority"),
      binding<wait_for_event>("streamWaitEvent"),
      binding<launch_host>("launchHostFunc"),
      binding<begin_capture>("streamBeginCapture"),
      binding<end_capture>("streamEndCapture"),
      binding<is_capturing>("streamIsCapturing"),
      binding<create_event>("eventCreate"),
      binding<create_event_with_flags>("eventCreateWithFlags"),
      binding<destroy_event>("eventDestroy"),
      binding<record_event>("eventRecord"),
      binding<query_event>("eventQuery"),
      binding<synchronize_event>("eventSynchronize"),
      binding<elapsed>("eventElapsedTime"),
      binding<instantiate>("graphInstantiate"),
      binding<launch_graph>("graphLaunch"),
      binding<upload_graph>("graphUpload"),
      binding<destroy_graph>("graphDestroy"),
      binding<destroy_executable>("graphExecDestroy"),
  };
  return all;
}

// A function that is not here: it raises an error with its name.
constexpr int most_refused = 128;
std::string& refused_names(int number) {
  static auto* const names = new std::string[most_refused];
  return names[number];
}
template <int Number, bool Pointer>
intptr_t refused() {
  PyErr_Format(PyExc_NotImplementedError, "testbed.driver has no %s", refused_names(Number).c_str());
  return Pointer ? 0 : -1;
}
template <int... Numbers>
void* refusing(int number, bool pointer, std::integer_sequence<int, Numbers...>) {
  static void* const pointers[] = {reinterpret_cast<void*>(refused<Numbers, true>)...};
  static void* const numbers[] = {reinterpret_cast<void*>(refused<Numbers, false>)...};
  return pointer ? pointers[number] : numbers[number];
}

// Called by Python without going through ctypes, since launchers ask it at every call.
PyObject* python_get_device(PyObject*, PyObject*) { return PyLong_FromLong(current_device()); }
PyMethodDef get_device_method{"getDevice", python_get_device, METH_NOARGS, nullptr};

}  // namespace

// Puts the functions above into the capsules of `module`, refusals into those of all others but
// `kept`; returns the names of what is there.
API PyObject* driver_replace_runtime(PyObject* module, PyObject* kept) {
  runtime = module;
  Py_INCREF(runtime);
  PyObject* const capsules = PyObject_GetAttrString(module, "__pyx_capi__");
  PyObject* const replaced = PySet_New(nullptr);
  PyObject *name, *capsule;
  int count = 0;
  for (Py_ssize_t at = 0; capsules && PyDict_Next(capsules, &at, &name, &capsule);) {
    const std::string called = PyUnicode_AsUTF8(name), type = PyCapsule_GetName(capsule);
    if (type.find('(') == std::string::npos || PySet_Contains(kept, name)) continue;
    void* function = nullptr;
    for (const Entry& one : entries()) {
      if (one.name != called) continue;
      if (!same(one, type)) {
        PyErr_Format(PyExc_TypeError, "CuPy's %s is %s", called.c_str(), type.c_str());
        return nullptr;
      }
      function = one.function;
      PySet_Add(replaced, name);
    }
    if (!function) {
      refused_names(count) = called;
      const bool pointer = type.compare(0, 3, "int") != 0 || type.compare(0, 4, "intp") == 0;
      function = refusing(count++, pointer, std::make_integer_sequence<int, most_refused>());
    }
    PyCapsule_SetPointer(capsule, function);
  }
  Py_XDECREF(capsules);
  PyObject* const quick = PyCFunction_New(&get_device_method, nullptr);
  PyObject_SetAttrString(module, "getDevice", quick);
  Py_DECREF(quick);
  return replaced;
}
