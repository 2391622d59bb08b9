// Products of matrices as cuBLAS computes them, in the order of the driver's streams.
//
// Functions of other names that CuPy asks for are refused: library.py makes them.
#include <cstddef>
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))

API int cuLaunchHostFunc(void*, void (*)(void*), void*);
API int cuMemsetD8Async(uintptr_t, unsigned char, size_t, void*);

namespace {

constexpr int success = 0, execution_failed = 13, not_supported = 15;
constexpr int real_32 = 0, real_64 = 1;  // cudaDataType_t

struct Handle {
  void* stream;
};

template <typename T> struct Product {
  bool a_transposed, b_transposed;
  int m, n, k, lda, ldb, ldc;
  T alpha, beta;
  const T *a, *b;
  T* c;
};

// By columns: c = alpha * a * b + beta * c.
template <typename T> void compute(void* given) {
  const auto& p = *static_cast<const Product<T>*>(given);
  for (int j = 0; j < p.n; ++j)
    for (int i = 0; i < p.m; ++i) {
      T sum = 0;
      for (int l = 0; l < p.k; ++l) {
        const T x = p.a_transposed ? p.a[size_t(i) * p.lda + l] : p.a[size_t(l) * p.lda + i];
        sum += x * (p.b_transposed ? p.b[size_t(l) * p.ldb + j] : p.b[size_t(j) * p.ldb + l]);
      }
      T& out = p.c[size_t(j) * p.ldc + i];
      out = p.alpha * sum + (p.beta != 0 ? p.beta * out : 0);
    }
}

template <typename T>
int multiply(void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,
             int lda, const void* b, int ldb, const void* beta, void* c, int ldc) {
  if (ldc != m) return not_supported;  // gaps between columns, which a copy would have to leave
  // It stays: a graph may run it again.
  auto* const product = new Product<T>{
      ta != 0, tb != 0, m, n, k, lda, ldb, ldc, *static_cast<const T*>(alpha),
      *static_cast<const T*>(beta), static_cast<const T*>(a), static_cast<const T*>(b),
      static_cast<T*>(c)};
  void* const stream = static_cast<Handle*>(handle)->stream;
  const size_t bytes = size_t(m) * n * sizeof(T);
  if (product->beta == 0 && bytes)  // for the driver, which knows what was written
    if (cuMemsetD8Async(reinterpret_cast<uintptr_t>(c), 0, bytes, stream)) return execution_failed;
  return cuLaunchHostFunc(stream, compute<T>, product) ? execution_failed : success;
}

}  // namespace

API int cublasCreate_v2(void** handle) {
  *handle = new Handle{nullptr};
  return success;
}
API int cublasDestroy_v2(void* handle) {
  delete static_cast<Handle*>(handle);
  return success;
}
API int cublasSetStream_v2(void* handle, void* stream) {
  static_cast<Handle*>(handle)->stream = stream;
  return success;
}
API int cublasGetStream_v2(void* handle, void** stream) {
  *stream = static_cast<Handle*>(handle)->stream;
  return success;
}
API int cublasGetVersion_v2(void*, int* version) {
  *version = 120900;
  return success;
}
API int cublasSetMathMode(void*, int) { return success; }
API int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return success;
}
API int cublasSetPointerMode_v2(void*, int on_device) { return on_device ? not_supported : success; }
API int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return success;
}
API int cublasGemmEx(void* handle, int ta, int tb, int m, int n, int k, const void* alpha,
                     const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                     const void* beta, void* c, int c_type, int ldc, int, int) {
  if (a_type != b_type || a_type != c_type) return not_supported;
  if (a_type == real_32)
    return multiply<float>(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  if (a_type == real_64)
    return multiply<double>(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  return not_supported;
}
API int cublasSgemmEx(void* handle, int ta, int tb, int m, int n, int k, const void* alpha,
                      const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                      const void* beta, void* c, int c_type, int ldc) {
  if (a_type == real_64) return not_supported;
  return cublasGemmEx(handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c,
                      c_type, ldc, 0, 0);
}
API int cublasSgemm_v2(void* handle, int ta, int tb, int m, int n, int k, const void* alpha,
                       const void* a, int lda, const void* b, int ldb, const void* beta, void* c,
                       int ldc) {
  return multiply<float>(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
API int cublasDgemm_v2(void* handle, int ta, int tb, int m, int n, int k, const void* alpha,
                       const void* a, int lda, const void* b, int ldb, const void* beta, void* c,
                       int ldc) {
  return multiply<double>(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
