// The only file that knows Python: checks arrays, releases the GIL, forwards to kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "kernels.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

// nanobind converts nothing here: every argument is `noconvert`, so a wrong dtype, rank or layout is a TypeError.
template <class Scalar>
using Input = nb::ndarray<const Scalar, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class Scalar>
using Output = nb::ndarray<Scalar, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class Array, class Like>
void check_shape(const char* name, const Array& array, const Like& like) {
  if (array.shape(0) != like.shape(0) || array.shape(1) != like.shape(1))
    throw nb::value_error((std::string(name) + " has another shape than rewards").c_str());
}

template <class Real>
void gae(Input<Real> rewards, Input<Real> values, Input<Real> next_values, Input<bool> terminated,
         Input<bool> truncated, double gamma, double gae_lambda, Output<Real> advantages) {
  check_shape("values", values, rewards);
  check_shape("next_values", next_values, rewards);
  check_shape("terminated", terminated, rewards);
  check_shape("truncated", truncated, rewards);
  check_shape("advantages", advantages, rewards);
  nb::gil_scoped_release unlocked;
  fastrl::gae(rewards.data(), values.data(), next_values.data(), terminated.data(), truncated.data(), rewards.shape(0),
              rewards.shape(1), gamma, gae_lambda, advantages.data());
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
}
