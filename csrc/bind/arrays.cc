// From Python's arrays to ours: contiguous, aligned, of a dtype we know.
#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#include "bind/bind.h"
//
#include <numpy/arrayobject.h>

#include "tensor/tensor.h"

namespace windlass::bind {
namespace {

[[noreturn]] void refuse(const Where& where, const std::string& why) {
  throw StatusError{Status(Code::kShapeMismatch, where.text() + ": " + why)};
}

std::string dtype_text(const nb::dlpack::dtype& t) {
  const char* code = "";
  switch (static_cast<nb::dlpack::dtype_code>(t.code)) {
    case nb::dlpack::dtype_code::Int: code = "int"; break;
    case nb::dlpack::dtype_code::UInt: code = "uint"; break;
    case nb::dlpack::dtype_code::Float: code = "float"; break;
    case nb::dlpack::dtype_code::Bfloat: code = "bfloat"; break;
    case nb::dlpack::dtype_code::Complex: code = "complex"; break;
    case nb::dlpack::dtype_code::Bool: return "bool";
    default: code = "dlpack type "; break;
  }
  return code + std::to_string(t.bits);
}

void check_layout(const Where& where, size_t dims, const int64_t* shape, const int64_t* strides, const void* data,
                  size_t align) {
  for (size_t i = 0; i < dims; ++i) {
    if (shape[i] == 0) return;  // nothing to lay out
  }
  int64_t expected = 1;
  for (size_t i = dims; i-- > 0;) {
    if (shape[i] > 1 && strides[i] != expected) refuse(where, "the array is not contiguous in C order");
    expected *= shape[i];
  }
  if (reinterpret_cast<uintptr_t>(data) % align != 0) {
    refuse(where, "the array is not aligned to " + std::to_string(align) + " bytes");
  }
}

}  // namespace

Array to_array(const Where& where, const nb::dlpack::dtype& dtype, const void* data, size_t dims, const int64_t* shape,
               const int64_t* strides) {
  using enum nb::dlpack::dtype_code;
  Array a;
  const auto is = [&](nb::dlpack::dtype_code code, uint8_t bits) {
    return dtype.lanes == 1 && dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits;
  };
  if (is(Float, 32)) {
    a.dtype = Dtype::kFloat32;
  } else if (is(Float, 64)) {
    a.dtype = Dtype::kFloat64;
  } else if (is(Int, 64)) {
    a.dtype = Dtype::kInt64;
  } else if (is(Float, 16)) {
    a.dtype = Dtype::kFloat16;
  } else if (is(Bfloat, 16) || is(UInt, 16)) {  // numpy has no bfloat16: the Python side passes its bits as uint16
    a.dtype = Dtype::kBfloat16;
  } else {
    refuse(where, "expected float32, bfloat16, float16, float64 or int64, saw " + dtype_text(dtype));
  }
  if (dims > limits::kTensorDimsMax)
    refuse(where, "at most " + std::to_string(limits::kTensorDimsMax) + " dimensions, saw " + std::to_string(dims));
  check_layout(where, dims, shape, strides, data, size_of(a.dtype));
  a.data = const_cast<void*>(data);
  a.dims = static_cast<uint32_t>(dims);
  for (size_t i = 0; i < dims; ++i) a.shape[i] = static_cast<uint64_t>(shape[i]);
  return a;
}

bool plain_array(nb::handle object, bool writable, Array* a) {
  // Now, since servers and the scheduler see no arrays, and begin sooner without numpy.
  if (PyArray_API == nullptr && _import_array() < 0) throw nb::python_error();
  if (!PyArray_CheckExact(object.ptr())) return false;
  auto* const array = reinterpret_cast<PyArrayObject*>(object.ptr());
  const int needs = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | (writable ? NPY_ARRAY_WRITEABLE : 0);
  const int dims = PyArray_NDIM(array);
  if (!PyArray_CHKFLAGS(array, needs) || !PyArray_ISNOTSWAPPED(array) || dims > int{limits::kTensorDimsMax})
    return false;
  switch (PyArray_TYPE(array)) {
    case NPY_FLOAT: a->dtype = Dtype::kFloat32; break;
    case NPY_DOUBLE: a->dtype = Dtype::kFloat64; break;
    case NPY_INT64: a->dtype = Dtype::kInt64; break;
    case NPY_HALF: a->dtype = Dtype::kFloat16; break;
    default: return false;
  }
  a->data = PyArray_DATA(array);
  a->dims = static_cast<uint32_t>(dims);
  for (int i = 0; i < dims; ++i) a->shape[i] = static_cast<uint64_t>(PyArray_DIM(array, i));
  return true;
}

Keys to_keys(const Where& where, const In& a) {
  using enum nb::dlpack::dtype_code;
  const nb::dlpack::dtype t = a.dtype();
  Keys keys;
  const bool is_int = t.lanes == 1 && t.code == static_cast<uint8_t>(Int);
  if (is_int && t.bits == 64) {
    keys.type = KeyType::kInt64;
  } else if (is_int && t.bits == 32) {
    keys.type = KeyType::kInt32;
  } else if (t.lanes == 1 && t.code == static_cast<uint8_t>(UInt) && t.bits == 64) {
    keys.type = KeyType::kUint64;
  } else {
    refuse(where, "expected int64, uint64 or int32, saw " + dtype_text(t));
  }
  if (a.ndim() != 1) refuse(where, "expected one dimension, saw " + std::to_string(a.ndim()));
  check_layout(where, 1, a.shape_ptr(), a.stride_ptr(), a.data(), t.bits / 8);
  keys.data = a.data();
  keys.n = a.shape(0);
  return keys;
}

Hyper to_hyper(nb::handle tuple) {
  Hyper hyper;
  size_t i = 0;
  if (PyTuple_CheckExact(tuple.ptr()) && nb::len(tuple) <= limits::kRuleHyperMax) {  // the usual case: made by rules
    for (const auto n = static_cast<size_t>(PyTuple_GET_SIZE(tuple.ptr())); i < n; ++i) {
      hyper.v[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i)));
      if (hyper.v[i] == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
    }
    return hyper;
  }
  for (nb::handle h : tuple) {
    if (i == limits::kRuleHyperMax) throw StatusError{Status(Code::kInternal, "too many hyperparameters")};
    hyper.v[i++] = nb::cast<double>(h);
  }
  return hyper;
}

}  // namespace windlass::bind
