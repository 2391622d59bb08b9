// Tensors of a library that describes them by DLPack's C functions, as new versions of PyTorch do.

#pragma once

#include <nanobind/nanobind.h>

#include "arrays.h"

// DLPack's (github.com/dmlc/dlpack, version 1).
struct DLTensor {
    void* data;
    struct {
        int32_t type, number;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;  // in elements
    uint64_t byte_offset;
};

// True if an object is of a type that `use_tensors` was given.
bool is_tensor(PyObject* object);

constexpr int ON_HOST = -1, ELSEWHERE = -2;

// A tensor's memory, for as long as the caller holds the tensor.
class Tensor {
public:
    explicit Tensor(PyObject* object);

    // Strides in bytes are written to `strides`. There are at most MOST_AXES.
    void describe(Py_buffer& buffer, Py_ssize_t (&strides)[MOST_AXES]) const;

    int dtype() const;  // -1 if kernels have no such one
    // The number of the CUDA device that it is on, ON_HOST, or ELSEWHERE.
    int place() const;
    const DLTensor* operator->() const { return &tensor_; }

private:
    DLTensor tensor_;
};

bool requires_grad(PyObject* tensor);

// True if its memory holds -x.
bool is_negative(PyObject* tensor);

// True if a mode, a transform or a tracer takes part in what is done to a tensor.
bool is_observed(PyObject* tensor);

// NumPy's or CuPy's views of the memory of a list of tensors.
nanobind::object views_of_tensors(nanobind::list tensors);

void define_tensors(nanobind::module_& module);
