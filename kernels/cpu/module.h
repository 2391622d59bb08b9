// Parts that the bindings of all families share.

#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

#include "environment.h"
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
            list_ = unchanging(items.ptr());
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

// The kernels of the instruction set that was chosen.
const ListKernels& list_kernels();

// True if Python's signal handlers raised: KeyboardInterrupt, say.
bool interrupted();

// Result of run(), which waits for the GIL. When the interpreter ends, Python before 3.14 unwinds
// a thread that does so, through frames that other threads work for and destructors that may not
// throw. Instead, it waits here for the process to end, as it does in later versions.
template <typename F> auto or_wait_for_the_end(F run) noexcept {
    try {
        return run();
    } catch (...) {
        for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
}

// Other Python threads may run for as long as this lives.
class WithoutGil {
public:
    WithoutGil() : thread_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        or_wait_for_the_end([&] { PyEval_RestoreThread(thread_); });
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    PyThreadState* thread_;
};

// A function that Python calls, in the floating-point environment that results do not depend on.
template <auto run> struct Computing;

template <typename... A, void (*run)(A...)> struct Computing<run> {
    static void call(A... given) {
        const DefaultEnvironment environment;
        run(given...);
    }
};

void define_lists(nanobind::module_& module);
void define_overlap(nanobind::module_& module);
void define_xla_lists(nanobind::module_& module);
