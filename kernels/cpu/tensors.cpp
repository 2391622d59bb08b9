// gradkit._cpu.compiled: tensors, whose memory is found without an array for each.

#include "tensors.h"

#include <atomic>
#include <vector>

#include "memory.h"
#include "results.h"

namespace nb = nanobind;

namespace {

enum Code : uint8_t { FLOAT = 2, BFLOAT = 4 };

constexpr int32_t HOST = 1, CUDA = 2;

// DLPack's structure of a tensor that its producer frees.
struct Managed {
    uint32_t major, minor;
    void* owner;
    void (*free)(Managed* self);
    uint64_t flags;
    DLTensor tensor;
};

// Contents of the capsule `__dlpack_c_exchange_api__` of a type.
struct ExchangeApi {
    uint32_t major, minor;
    const void *older, *allocate, *from_object;
    int (*to_object)(Managed* tensor, void** object);  // as the next one; it takes the tensor
    int (*describe)(void* object, DLTensor* tensor);  // -1 and an exception if it cannot
};

struct Library {
    const ExchangeApi* api;
    PyTypeObject* types[2];  // tensors and parameters
    PyObject* make_views;
    PyObject* observers[3];  // functions that say whether something sees what is done to a tensor
};

const Library nothing = {};
std::atomic<const Library*> library{&nothing};  // other threads read it: it is not changed or freed
int32_t host = HOST, cuda = CUDA;  // what counts as such a device

const Library& current_library() { return *library.load(std::memory_order_acquire); }

// True if tensors of these types can be described. `views` makes NumPy's or CuPy's of a list of them.
bool use_tensors(nb::handle tensor, nb::handle parameter, nb::handle capsule, nb::handle views) {
    void* const found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (!found) throw nb::python_error();
    const ExchangeApi* const given = static_cast<const ExchangeApi*>(found);
    if (given->major != 1 || !given->describe) return false;
    const nb::object extension = nb::module_::import_("torch").attr("_C");
    const char* const names[] = {
        "_dispatch_isTensorSubclassLike", "_are_functorch_transforms_active", "_get_tracing_state",
    };
    Library* const made = new Library{given, {}, views.inc_ref().ptr(), {}};
    made->types[0] = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
    made->types[1] = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
    for (int k = 0; k < 3; ++k)
        made->observers[k] = nb::object(extension.attr(names[k])).release().ptr();
    library.store(made, std::memory_order_release);
    return true;
}

// A new tensor. Its memory is kept for later results once nothing holds the tensor.
struct Result {
    Managed managed;
    Block block;
    std::vector<int64_t> shape, strides;
};

// Makes a tensor on the host, without gaps. Strides are in elements.
nb::object new_tensor(nb::tuple shape, nb::tuple strides, int dtype) {
    constexpr uint8_t bits[] = {16, 16, 32, 64};
    Result own = {};
    size_t size = bits[dtype] / 8;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
        own.shape.push_back(nb::cast<int64_t>(shape[axis]));
        own.strides.push_back(nb::cast<int64_t>(strides[axis]));
        size *= own.shape.back();
    }
    own.block = block_of(size);
    Result* const result = new Result(std::move(own));
    const int32_t axes = static_cast<int32_t>(shape.size());
    const uint8_t code = dtype == BF16 ? BFLOAT : FLOAT;
    result->managed = {
        1, 0, result,
        [](Managed* self) {
            Result* const freed = static_cast<Result*>(self->owner);
            keep(freed->block);
            delete freed;
        },
        0,
        {result->block.data, {HOST, 0}, axes, {code, bits[dtype], 1}, result->shape.data(),
         result->strides.data(), 0},
    };
    void* made = nullptr;
    if (current_library().api->to_object(&result->managed, &made)) throw nb::python_error();
    return nb::steal(static_cast<PyObject*>(made));
}

// From now on tensors on these types of device, as DLPack numbers them, are taken for those on the host
// and on a CUDA device: tests have no other.
void use_places(int32_t own_host, int32_t own_cuda) {
    host = own_host;
    cuda = own_cuda;
}

bool is_true(PyObject* answer) {
    if (!answer) throw nb::python_error();
    return nb::steal(answer).is(nb::handle(Py_True));
}

}  // namespace

bool is_tensor(PyObject* object) {
    const auto& types = current_library().types;
    return Py_TYPE(object) == types[0] || Py_TYPE(object) == types[1];
}

Tensor::Tensor(PyObject* object) {
    if (current_library().api->describe(object, &tensor_)) throw nb::python_error();
}

void Tensor::describe(Py_buffer& buffer, Py_ssize_t (&strides)[MOST_AXES]) const {
    buffer = {};
    buffer.buf = static_cast<char*>(tensor_.data) + tensor_.byte_offset;
    buffer.itemsize = tensor_.dtype.bits * tensor_.dtype.lanes / 8;
    buffer.ndim = tensor_.ndim;
    buffer.shape = reinterpret_cast<Py_ssize_t*>(tensor_.shape);
    buffer.strides = strides;
    for (int axis = 0; axis < tensor_.ndim; ++axis)
        strides[axis] = tensor_.strides[axis] * buffer.itemsize;
}

int Tensor::dtype() const {
    const int bits = tensor_.dtype.bits * tensor_.dtype.lanes;
    if (tensor_.dtype.code == BFLOAT && bits == 16) return BF16;
    if (tensor_.dtype.code != FLOAT) return -1;
    return bits == 16 ? F16 : bits == 32 ? F32 : bits == 64 ? F64 : -1;
}

bool requires_grad(PyObject* tensor) {
    return is_true(PyObject_GetAttr(tensor, attributes.requires_grad));
}

bool is_negative(PyObject* tensor) {
    return is_true(PyObject_VectorcallMethod(attributes.is_neg, &tensor, 1, nullptr));
}

int Tensor::place() const {
    const int32_t type = tensor_.device.type;
    return type == host ? ON_HOST : type == cuda ? tensor_.device.number : ELSEWHERE;
}

bool is_observed(PyObject* tensor) {
    const auto& observers = current_library().observers;
    const nb::handle is_like_subclass(observers[0]), are_transforms_active(observers[1]);
    const nb::handle tracing_state(observers[2]);
    return is_like_subclass(nb::handle(tensor)).is(nb::handle(Py_True))
        || are_transforms_active().is(nb::handle(Py_True)) || !tracing_state().is_none();
}

nb::object views_of_tensors(nb::list tensors) {
    return nb::handle(current_library().make_views)(tensors);
}

void define_tensors(nb::module_& module) {
    module.def("new_tensor", &new_tensor);
    module.def("use_tensors", &use_tensors);
    module.def("use_places", &use_places);
}
