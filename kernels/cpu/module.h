// What the bindings of all families share.

#pragma once

#include <nanobind/nanobind.h>

#include "list_calls.h"
#include "memory.h"
#include "table.h"

// The memory of an array or a tensor, which the caller holds.
class Buffer {
public:
    explicit Buffer(PyObject* array) : dtype_(open_memory(array, buffer_, strides_)) {}
    Buffer(const Table& table, i64 k) : buffer_(table.buffer(k)), dtype_(table.dtype(k)) {}
    ~Buffer() { PyBuffer_Release(&buffer_); }  // of what has an owner
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    const Py_buffer* operator->() const { return &buffer_; }
    const Py_buffer& operator*() const { return buffer_; }

    Dtype dtype() const {
        if (dtype_ >= 0) return static_cast<Dtype>(dtype_);
        return number_of(nanobind::handle(buffer_.obj).attr("dtype"));
    }

    Side side(const i64* strides) const {
        return {static_cast<char*>(buffer_.buf), dtype(), strides};
    }

private:
    Py_buffer buffer_;
    Py_ssize_t strides_[MOST_AXES];
    int dtype_;
};

static_assert(sizeof(Py_ssize_t) == sizeof(i64), "strides are read where they lie");

inline const i64* numbers(const Py_ssize_t* values) { return reinterpret_cast<const i64*>(values); }

// The arrays of a list, which are borrowed: a table's, or those of any sequence.
class Sequence {
public:
    explicit Sequence(nanobind::handle items) : table_(Table::in(items)) {
        if (table_)
            list_ = table_->arrays();
        else if (PyList_Check(items.ptr()))
            list_ = nanobind::borrow(items);
        else
            list_ = nanobind::steal(PySequence_List(items.ptr()));
        if (!list_.is_valid()) throw nanobind::python_error();
    }

    bool is_table() const { return table_ != nullptr; }
    i64 length() const { return PyList_Size(list_.ptr()); }

    PyObject* operator[](i64 k) const {
        PyObject* item = PyList_GetItem(list_.ptr(), k);
        if (!item) throw nanobind::python_error();
        return item;
    }

    Buffer buffer(i64 k) const { return table_ ? Buffer(*table_, k) : Buffer((*this)[k]); }

private:
    const Table* table_;
    nanobind::object list_;
};

// Those of the instruction set that was chosen.
const ListKernels& list_kernels();

// Whether Python's signal handlers raised: KeyboardInterrupt, say.
bool interrupted();

void define_lists(nanobind::module_& module);
void define_overlap(nanobind::module_& module);
void define_xla_lists(nanobind::module_& module);
