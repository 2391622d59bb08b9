// The memory of objects that Python passes: NumPy's arrays, tensors, and any with the buffer protocol.

#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

#include "arrays.h"

// Attributes' names, made when the module is loaded: a thread that waited for another's first call
// would do so in C++, where the interpreter cannot stop it.
inline const struct Attributes {
    static PyObject* make(const char* name) { return PyUnicode_InternFromString(name); }

    PyObject *c_contiguous = make("_c_contiguous"), *class_ = make("__class__"), *data = make("data");
    PyObject *device_id = make("device_id"), *dtype = make("dtype"), *is_neg = make("is_neg");
    PyObject *passed = make("passed"), *ptr = make("ptr"), *requires_grad = make("requires_grad");
    PyObject *shape = make("shape"), *size = make("size"), *strides = make("strides");
} attributes;

// Items that threads find and add at once. None ever goes.
template <typename T, size_t MOST> class Remembered {
public:
    const T* begin() const { return items_; }
    const T* end() const { return items_ + count_.load(std::memory_order_acquire); }

    // False if there is no room.
    bool add(const T& item) {
        const nanobind::ft_lock_guard lock(mutex_);
        const size_t count = count_.load(std::memory_order_relaxed);
        if (count == MOST) return false;
        items_[count] = item;
        count_.store(count + 1, std::memory_order_release);
        return true;
    }

private:
    T items_[MOST];
    std::atomic<size_t> count_{0};
    nanobind::ft_mutex mutex_;
};

// To be called before any of these: finds NumPy.
void define_memory();

// True if an object is a numpy.ndarray, and of no subclass.
bool is_numpys(PyObject* object);

// The dtype of a numpy.ndarray: a borrowed reference.
nanobind::handle dtype_of(PyObject* array);

// True if gradkit counts a dtype as floating-point.
bool is_floating(nanobind::handle dtype);

// The number of a dtype that kernels have.
Dtype number_of(nanobind::handle dtype);

// Opens an array's memory, which is valid as long as the caller holds the array and the buffer.
// Strides are written to `strides` if they lie nowhere else. Returns the dtype's number, as above; -1 if
// a tensor's has none, or if only `buffer.obj` tells it.
int open_memory(PyObject* array, Py_buffer& buffer, Py_ssize_t (&strides)[MOST_AXES]);
