#include "kernels.h"

namespace fastrl {
namespace {

template <class Real>
void gae_rows(const Real* rewards, const Real* values, const Real* next_values, const bool* terminated,
              const bool* truncated, std::size_t num_steps, std::size_t num_envs, double gamma_, double gae_lambda,
              Real* __restrict advantages) {
  const Real gamma = static_cast<Real>(gamma_);
  const Real decay = static_cast<Real>(gamma_ * gae_lambda);
  for (std::size_t t = num_steps; t-- > 0;) {
    const std::size_t row = t * num_envs;
    const bool last = t + 1 == num_steps;
    for (std::size_t i = row; i < row + num_envs; ++i) {
      const Real bootstrap = terminated[i] ? Real(0) : gamma * next_values[i];
      const Real delta = rewards[i] + bootstrap - values[i];
      const Real trace = last || terminated[i] || truncated[i] ? Real(0) : decay * advantages[i + num_envs];
      advantages[i] = delta + trace;
    }
  }
}

}  // namespace

void gae(const float* rewards, const float* values, const float* next_values, const bool* terminated,
         const bool* truncated, std::size_t num_steps, std::size_t num_envs, double gamma, double gae_lambda,
         float* advantages) {
  gae_rows(rewards, values, next_values, terminated, truncated, num_steps, num_envs, gamma, gae_lambda, advantages);
}

void gae(const double* rewards, const double* values, const double* next_values, const bool* terminated,
         const bool* truncated, std::size_t num_steps, std::size_t num_envs, double gamma, double gae_lambda,
         double* advantages) {
  gae_rows(rewards, values, next_values, terminated, truncated, num_steps, num_envs, gamma, gae_lambda, advantages);
}

}  // namespace fastrl
