// A list's arrays as one table, whatever library they are of: NumPy's, tensors, or a device's arrays.

#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "memory.h"
#include "overlap.h"

// A container, or without the GIL a copy, which no other thread can change.
nanobind::object unchanging(PyObject* container);

class Table {
public:
    // The leaves of dicts, lists and tuples in each other, in order and without None. None if a backend
    // cannot use them as they are: one is of another type, not of floating-point numbers, or of another
    // library or on another device than the first; or a container is of a type of its own. With
    // `written` each must be writable too, and no two may share memory.
    static nanobind::object of(nanobind::handle tree, bool written);
    // The leaves alone, whatever they are, and whether `is_flat`; None if too many containers are in each
    // other.
    static nanobind::object leaves(nanobind::handle tree);
    // Appends an array; false if `of` would say None of it. With `detach` it may require grad; `as_flat`:
    // what is contiguous may be a row of one axis.
    bool add(PyObject* array, bool detach = false, bool as_flat = false);
    // True if an array is of this library and device, of any dtype, and has no axes; `range`: its bytes.
    bool is_beside(PyObject* array, Range& range) const;
    // The table that an object is, or null.
    static const Table* in(nanobind::handle object);

    i64 length() const { return static_cast<i64>(rows_.size()); }
    Py_buffer buffer(i64 k) const;
    Dtype dtype(i64 k) const { return rows_[k].dtype; }
    PyObject* array(i64 k) const { return PyList_GetItem(arrays_.ptr(), k); }
    nanobind::list arrays() const { return arrays_; }
    nanobind::object tree() const { return tree_; }
    bool are_tensors() const { return library_ == TENSORS; }
    bool are_numpys() const { return library_ == NUMPY; }
    // The number of the CUDA device that they are on, or ON_HOST.
    int device() const { return device_; }
    // A number for the library and the device.
    i64 place() const { return 3 * i64{device_} + library_; }
    // True if the container is a list of nothing but these.
    bool is_flat() const { return flat_; }
    // True if each is writable, and no two of its elements share memory.
    bool each_can_be_written() const;

    // True if another table's container has the same keys and positions, in the same order.
    bool has_places_of(const Table& other) const;
    // The different pairs of dtypes of this and another table, as the bits 4 * own + other; -1 if arrays
    // at the same position differ in their shapes.
    int pairs_with(const Table& other) const;
    // Adds the arrays' ranges, but for those that are the very arrays of another table.
    void append_to(Ranges& ranges, bool written, const Table* but_for = nullptr) const;

    // Arrays that a backend can use: these, or views of their memory.
    nanobind::object views();
    nanobind::object view(nanobind::handle k);  // of one, without making all
    // Arguments of launches on a device: the arrays' addresses; their layout, which is dtypes and sizes if
    // they are contiguous; and an object that stands for both, the same one if the same arrays come again.
    nanobind::object addresses();
    nanobind::bytes layout() const;
    nanobind::object known();
    nanobind::object plan = nanobind::none();  // what a backend has computed of them, for its next operation in this call
    nanobind::object picked(nanobind::handle chosen) const;
    // Other arrays of the same library.
    nanobind::object like(nanobind::list arrays) const;

private:
    struct Row {
        char* data;
        i64 extents;  // where its shape stands, and then its strides in bytes
        int ndim;
        Dtype dtype;
        bool readonly;
        bool as_flat = false;  // contiguous and known by its size alone: its shape takes longer to ask for
    };

    bool collect(PyObject* tree, int depth);
    bool read();
    bool read_array(PyObject* array);
    bool read_tensor(PyObject* tensor, bool detach);
    bool read_device_array(PyObject* array, bool as_flat);
    bool is_like(const Table& other, i64 k) const;
    std::vector<i64> numbers() const;

    nanobind::object tree_;
    nanobind::list arrays_;
    nanobind::object views_, addresses_, known_;
    std::vector<Row> rows_;
    std::vector<i64> extents_;
    enum Library { NUMPY, TENSORS, DEVICE_ARRAYS } library_ = NUMPY;
    int device_ = -1;
    bool flat_ = false;
};

void define_table(nanobind::module_& module);
