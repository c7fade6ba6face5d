// One pass of Adam over flat arrays, for optimizers on the host.
#pragma once

#include <cstddef>

namespace collectives {

// Settings of one step; see collectives/train/optimizers.py.
struct AdamStep {
  double coefficient;  // of the gradient: unscaling and clipping
  double l2;           // weight decay that is added to the gradient
  double decay;        // what the weights are multiplied by
  double beta1, beta2;
  double eps;
  double factor;  // of first / (sqrt(second) + eps)
};

// w, first and second are written. Every operation rounds once, in the order of the Python text, so
// the bits are those of that text, for any count and alignment.
void adam(float* w, const float* g, float* first, float* second, std::size_t count,
          const AdamStep& step);
void adam(double* w, const double* g, double* first, double* second, std::size_t count,
          const AdamStep& step);

}  // namespace collectives
