// The only file that knows Python: checks arrays, releases the GIL, forwards to kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

// nanobind converts nothing here: every argument is `noconvert`, so a wrong dtype, rank or layout is a TypeError.
template <class Scalar, std::size_t rank>
using Input = nb::ndarray<const Scalar, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;
template <class Scalar, std::size_t rank>
using Output = nb::ndarray<Scalar, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;

template <class Array>
void check_shape(const char* name, const Array& array, const std::vector<std::size_t>& expected) {
  for (std::size_t axis = 0; axis < expected.size(); ++axis)
    if (array.shape(axis) != expected[axis])
      throw nb::value_error((std::string(name) + ": axis " + std::to_string(axis) + " has length " +
                             std::to_string(array.shape(axis)) + ", expected " + std::to_string(expected[axis]))
                                .c_str());
}

template <class Real>
void gae(Input<Real, 2> rewards, Input<Real, 2> values, Input<Real, 2> next_values, Input<bool, 2> terminated,
         Input<bool, 2> truncated, double gamma, double gae_lambda, Output<Real, 2> advantages) {
  const std::vector<std::size_t> shape{rewards.shape(0), rewards.shape(1)};
  check_shape("values", values, shape);
  check_shape("next_values", next_values, shape);
  check_shape("terminated", terminated, shape);
  check_shape("truncated", truncated, shape);
  check_shape("advantages", advantages, shape);
  nb::gil_scoped_release unlocked;
  fastrl::gae(rewards.data(), values.data(), next_values.data(), terminated.data(), truncated.data(), shape[0],
              shape[1], gamma, gae_lambda, advantages.data());
}

/// Checks qkv [batch, length, 3 * num_heads * width] and returns width.
std::size_t attention_width(const Input<float, 3>& qkv, std::size_t num_heads, int num_threads) {
  const std::size_t columns = qkv.shape(2), width = num_heads ? columns / (3 * num_heads) : 0;
  const bool known = width == 1 || width == 2 || width == 4 || width == 8;
  if (!known || columns != 3 * num_heads * width)
    throw nb::value_error(("qkv has " + std::to_string(columns) + " columns, expected 3 * num_heads * width for " +
                           std::to_string(num_heads) + " heads of width 1, 2, 4 or 8")
                              .c_str());
  if (num_threads < 1) throw nb::value_error("num_threads must be at least 1");
  return width;
}

void attention_forward(Input<float, 3> qkv, std::size_t num_heads, int num_threads, Output<float, 3> out,
                       Output<float, 4> stats, const std::string& isa) {
  const std::size_t batch = qkv.shape(0), length = qkv.shape(1);
  const std::size_t width = attention_width(qkv, num_heads, num_threads);
  check_shape("out", out, {batch, length, num_heads * width});
  check_shape("stats", stats, {batch, length, 2, num_heads});
  nb::gil_scoped_release unlocked;
  fastrl::attention_forward(qkv.data(), batch, length, num_heads, width, num_threads, out.data(), stats.data(),
                            isa);
}

void attention_backward(Input<float, 3> qkv, Input<float, 3> out, Input<float, 4> stats, Input<float, 3> grad_out,
                        std::size_t num_heads, int num_threads, Output<float, 3> grad_qkv, const std::string& isa) {
  const std::size_t batch = qkv.shape(0), length = qkv.shape(1);
  const std::size_t width = attention_width(qkv, num_heads, num_threads);
  check_shape("out", out, {batch, length, num_heads * width});
  check_shape("stats", stats, {batch, length, 2, num_heads});
  check_shape("grad_out", grad_out, {batch, length, num_heads * width});
  check_shape("grad_qkv", grad_qkv, {batch, length, 3 * num_heads * width});
  nb::gil_scoped_release unlocked;
  fastrl::attention_backward(qkv.data(), out.data(), stats.data(), grad_out.data(), batch, length, num_heads, width,
                             num_threads, grad_qkv.data(), isa);
}

template <class Real>
void bind_gae(nb::module_& module) {
  module.def("gae", &gae<Real>, "rewards"_a.noconvert(), "values"_a.noconvert(), "next_values"_a.noconvert(),
             "terminated"_a.noconvert(), "truncated"_a.noconvert(), "gamma"_a, "gae_lambda"_a,
             "advantages"_a.noconvert());
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "The C++ kernels of fastrl; csrc/kernels.h is their contract.";
  bind_gae<float>(module);
  bind_gae<double>(module);
  module.def("attention_forward", &attention_forward, "qkv"_a.noconvert(), "num_heads"_a, "num_threads"_a,
             "out"_a.noconvert(), "stats"_a.noconvert(), "isa"_a = "");
  module.def("attention_backward", &attention_backward, "qkv"_a.noconvert(), "out"_a.noconvert(),
             "stats"_a.noconvert(), "grad_out"_a.noconvert(), "num_heads"_a, "num_threads"_a,
             "grad_qkv"_a.noconvert(), "isa"_a = "");
  module.def("attention_isas", &fastrl::attention_isas);
}
