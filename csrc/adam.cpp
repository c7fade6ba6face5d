// One pass of Adam: seven streams through memory instead of the forty of an array library.
//
// 10.3 million float32 take 12 ms where numpy takes 26 (one core of a Xeon). The compiler makes the
// vectors; -fno-math-errno (CMakeLists.txt) lets it do so with the square root.

#include "adam.hpp"

#include <cmath>

#if defined(__x86_64__) && defined(__GNUC__)
#define COLLECTIVES_AVX2 __attribute__((target("avx2")))
#endif

namespace collectives {
namespace {

template <typename T, bool l2>
__attribute__((always_inline)) inline void loop(T* __restrict__ w, const T* __restrict__ g,
                                                T* __restrict__ first, T* __restrict__ second,
                                                std::size_t count, const AdamStep& step) {
  const T coefficient = static_cast<T>(step.coefficient), extra = static_cast<T>(step.l2);
  const T decay = static_cast<T>(step.decay), factor = static_cast<T>(step.factor);
  const T beta1 = static_cast<T>(step.beta1), rest1 = static_cast<T>(1 - step.beta1);
  const T beta2 = static_cast<T>(step.beta2), rest2 = static_cast<T>(1 - step.beta2);
  const T eps = static_cast<T>(step.eps);
  for (std::size_t i = 0; i < count; ++i) {
    T x = g[i] * coefficient;
    if constexpr (l2) x += w[i] * extra;
    const T m = first[i] * beta1 + x * rest1;
    const T v = second[i] * beta2 + x * x * rest2;
    first[i] = m;
    second[i] = v;
    w[i] = w[i] * decay - m / (std::sqrt(v) + eps) * factor;
  }
}

template <typename T>
__attribute__((always_inline)) inline void either(T* w, const T* g, T* first, T* second,
                                                  std::size_t count, const AdamStep& step) {
  if (step.l2 != 0) {
    loop<T, true>(w, g, first, second, count, step);
  } else {
    loop<T, false>(w, g, first, second, count, step);
  }
}

#ifdef COLLECTIVES_AVX2
COLLECTIVES_AVX2 void wide(float* w, const float* g, float* first, float* second, std::size_t count,
                           const AdamStep& step) {
  either(w, g, first, second, count, step);
}
COLLECTIVES_AVX2 void wide(double* w, const double* g, double* first, double* second,
                           std::size_t count, const AdamStep& step) {
  either(w, g, first, second, count, step);
}
#endif

template <typename T>
void choose(T* w, const T* g, T* first, T* second, std::size_t count, const AdamStep& step) {
#ifdef COLLECTIVES_AVX2
  if (__builtin_cpu_supports("avx2")) return wide(w, g, first, second, count, step);
#endif
  either(w, g, first, second, count, step);
}

}  // namespace

void adam(float* w, const float* g, float* first, float* second, std::size_t count,
          const AdamStep& step) {
  choose(w, g, first, second, count, step);
}

void adam(double* w, const double* g, double* first, double* second, std::size_t count,
          const AdamStep& step) {
  choose(w, g, first, second, count, step);
}

}  // namespace collectives
