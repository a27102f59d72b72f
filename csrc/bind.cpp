// The only file that knows Python: checks arrays, releases the GIL, forwards to kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
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

/// Ascending places at which the parts of num_envs envs begin, from 0; the last entry is their end.
void check_bases(const char* name, const Input<std::int64_t, 1>& bases, std::size_t num_envs) {
  check_shape(name, bases, {num_envs + 1});
  bool ascending = num_envs > 0 && bases.data()[0] == 0;
  for (std::size_t n = 0; n < num_envs; ++n) ascending = ascending && bases.data()[n] < bases.data()[n + 1];
  if (!ascending) throw nb::value_error((std::string(name) + " must ascend from 0").c_str());
}

using Bytes3 = Input<std::uint8_t, 3>;

/// Fills a fastrl::Ring, checking every length: bases [num_envs + 1] say how many slots there are.
fastrl::Ring check_ring(const Input<std::int64_t, 1>& bases, const Output<std::int64_t, 1>& counts,
                        const Output<bool, 1>& running, const Output<std::uint8_t, 2>& frames,
                        const Output<std::int64_t, 1>& actions, const Output<float, 1>& rewards,
                        const Output<std::uint8_t, 1>& flags, const Output<std::int32_t, 1>& final_index,
                        const Output<std::uint8_t, 2>& pending, const Output<std::uint8_t, 2>& finals,
                        const Output<std::int32_t, 1>& free_finals, const Output<std::int64_t, 1>& num_free) {
  const std::size_t num_envs = counts.shape(0), frame_bytes = frames.shape(1);
  check_bases("bases", bases, num_envs);
  const auto slots = static_cast<std::size_t>(bases.data()[num_envs]);
  check_shape("running", running, {num_envs});
  check_shape("frames", frames, {slots});
  check_shape("actions", actions, {slots});
  check_shape("rewards", rewards, {slots});
  check_shape("flags", flags, {slots});
  check_shape("final_index", final_index, {slots});
  check_shape("pending", pending, {num_envs, frame_bytes});
  check_shape("finals", finals, {finals.shape(0), frame_bytes});
  check_shape("free_finals", free_finals, {finals.shape(0)});
  check_shape("num_free", num_free, {1});
  if (num_free.data()[0] < 0 || num_free.data()[0] > static_cast<std::int64_t>(finals.shape(0)))
    throw nb::value_error("num_free must lie in [0, len(finals)]");
  return {num_envs,      frame_bytes,   bases.data(),       counts.data(),  running.data(), frames.data(),
          actions.data(), rewards.data(), flags.data(),       final_index.data(), pending.data(), finals.data(),
          free_finals.data(), num_free.data()};
}

std::size_t replay_add(Bytes3 obs, Input<std::int64_t, 2> row_actions, Input<float, 2> row_rewards,
                       Input<bool, 2> terminated, Input<bool, 2> truncated, Bytes3 next_obs, Input<bool, 2> valid,
                       std::size_t row, Input<std::int64_t, 1> bases, Output<std::int64_t, 1> counts,
                       Output<bool, 1> running, Output<std::uint8_t, 2> frames, Output<std::int64_t, 1> actions,
                       Output<float, 1> rewards, Output<std::uint8_t, 1> flags, Output<std::int32_t, 1> final_index,
                       Output<std::uint8_t, 2> pending, Output<std::uint8_t, 2> finals,
                       Output<std::int32_t, 1> free_finals, Output<std::int64_t, 1> num_free,
                       Output<std::int64_t, 2> ids) {
  const fastrl::Ring ring = check_ring(bases, counts, running, frames, actions, rewards, flags, final_index, pending,
                                       finals, free_finals, num_free);
  const std::size_t num_steps = obs.shape(0);
  const std::vector<std::size_t> shape{num_steps, ring.num_envs};
  check_shape("obs", obs, {num_steps, ring.num_envs, ring.frame_bytes});
  check_shape("next_obs", next_obs, {num_steps, ring.num_envs, ring.frame_bytes});
  check_shape("actions", row_actions, shape);
  check_shape("rewards", row_rewards, shape);
  check_shape("terminated", terminated, shape);
  check_shape("truncated", truncated, shape);
  check_shape("valid", valid, shape);
  check_shape("ids", ids, shape);
  const fastrl::Transitions rows{num_steps,          obs.data(),        next_obs.data(),  row_actions.data(),
                                 row_rewards.data(), terminated.data(), truncated.data(), valid.data()};
  nb::gil_scoped_release unlocked;
  return fastrl::replay_add(ring, rows, row, ids.data());
}

void replay_draw(Input<std::int64_t, 1> ends, Input<std::int64_t, 1> counts, Input<double, 1> uniforms,
                 Output<std::int64_t, 1> ids) {
  const std::size_t num_envs = counts.shape(0);
  check_shape("ends", ends, {num_envs});
  check_shape("ids", ids, {uniforms.shape(0)});
  if (!num_envs || ends.data()[num_envs - 1] < 1) throw nb::value_error("ends: nothing to draw from");
  for (std::size_t i = 0; i < uniforms.shape(0); ++i)
    if (!(uniforms.data()[i] >= 0 && uniforms.data()[i] < 1)) throw nb::value_error("uniforms must lie in [0, 1)");
  nb::gil_scoped_release unlocked;
  fastrl::replay_draw(ends.data(), counts.data(), num_envs, uniforms.data(), uniforms.shape(0), ids.data());
}

void replay_gather(Input<std::int64_t, 1> ids, Input<double, 1> gammas, std::size_t stack, int num_threads,
                   Input<std::int64_t, 1> bases, Output<std::int64_t, 1> counts, Output<bool, 1> running,
                   Output<std::uint8_t, 2> frames, Output<std::int64_t, 1> actions, Output<float, 1> rewards,
                   Output<std::uint8_t, 1> flags, Output<std::int32_t, 1> final_index,
                   Output<std::uint8_t, 2> pending, Output<std::uint8_t, 2> finals,
                   Output<std::int32_t, 1> free_finals, Output<std::int64_t, 1> num_free,
                   Output<std::uint8_t, 3> out_obs, Output<std::int64_t, 1> out_actions, Output<float, 1> out_returns,
                   Output<float, 1> out_discounts, Output<std::uint8_t, 3> out_next_obs) {
  const fastrl::Ring ring = check_ring(bases, counts, running, frames, actions, rewards, flags, final_index, pending,
                                       finals, free_finals, num_free);
  const std::size_t batch = ids.shape(0);
  check_shape("obs", out_obs, {batch, stack, ring.frame_bytes});
  check_shape("next_obs", out_next_obs, {batch, stack, ring.frame_bytes});
  check_shape("actions", out_actions, {batch});
  check_shape("returns", out_returns, {batch});
  check_shape("discounts", out_discounts, {batch});
  if (gammas.shape(0) < 2) throw nb::value_error("gammas must have n_step + 1 entries, n_step at least 1");
  if (stack < 1 || num_threads < 1) throw nb::value_error("stack and num_threads must be at least 1");
  for (std::size_t i = 0; i < batch; ++i) {
    const auto num_envs = static_cast<std::int64_t>(ring.num_envs);
    const std::int64_t id = ids.data()[i], n = id % num_envs, q = id / num_envs;
    const std::int64_t live = id < 0 ? 0 : ring.bases[n + 1] - ring.bases[n] - static_cast<std::int64_t>(stack) + 1;
    if (id < 0 || q >= ring.counts[n] || q < ring.counts[n] - live)
      throw nb::value_error(("ids: " + std::to_string(id) + " is not in the buffer").c_str());
  }
  const fastrl::Samples out{out_obs.data(), out_actions.data(), out_returns.data(), out_discounts.data(),
                            out_next_obs.data()};
  nb::gil_scoped_release unlocked;
  fastrl::replay_gather(ring, ids.data(), batch, stack, gammas.data(), gammas.shape(0) - 1, num_threads, out);
}

/// Fills a fastrl::Tree and a fastrl::Leaves; mins of length 0 means that there are none.
fastrl::Tree check_tree(const Input<std::int64_t, 1>& offsets, const Output<double, 1>& sums,
                        const Output<double, 1>& mins) {
  const std::size_t num_levels = offsets.shape(0);
  if (num_levels < 2 || offsets.data()[0] != 0 ||
      offsets.data()[num_levels - 1] + 1 != static_cast<std::int64_t>(sums.shape(0)))
    throw nb::value_error("offsets must begin with 0 and end with the place of the root, the last of sums");
  for (std::size_t level = 0; level + 1 < num_levels; ++level) {
    const std::int64_t here = offsets.data()[level + 1] - offsets.data()[level];
    const std::int64_t above = (level + 2 < num_levels ? offsets.data()[level + 2] : offsets.data()[level + 1] + 1) -
                               offsets.data()[level + 1];
    if (here < 8 || here % 8 != 0 || above < here / 8)
      throw nb::value_error("offsets: a level must hold a multiple of 8 nodes, and the next one a node for each 8");
  }
  if (mins.shape(0)) check_shape("mins", mins, {sums.shape(0)});
  return {num_levels, offsets.data(), sums.data(), mins.shape(0) ? mins.data() : nullptr};
}

fastrl::Leaves check_leaves(const Input<std::int64_t, 1>& bases, const Input<std::int64_t, 1>& counts,
                            const fastrl::Tree& tree) {
  check_bases("leaf_bases", bases, counts.shape(0));
  if (bases.data()[counts.shape(0)] > tree.offsets[1])
    throw nb::value_error("leaf_bases: more leaves than the tree has");
  return {counts.shape(0), bases.data(), counts.data()};
}

void tree_update(Input<std::int64_t, 1> ids, Input<double, 1> values, Input<std::int64_t, 1> bases,
                 Input<std::int64_t, 1> counts, Input<std::int64_t, 1> offsets, Output<double, 1> sums,
                 Output<double, 1> mins) {
  const fastrl::Tree tree = check_tree(offsets, sums, mins);
  const fastrl::Leaves leaves = check_leaves(bases, counts, tree);
  check_shape("values", values, {ids.shape(0)});
  nb::gil_scoped_release unlocked;
  std::vector<std::int64_t> nodes(ids.shape(0));
  fastrl::tree_update(tree, leaves, ids.data(), values.data(), ids.shape(0), nodes.data());
}

void tree_sample(Input<double, 1> uniforms, Input<std::int64_t, 1> bases, Input<std::int64_t, 1> counts,
                 Input<std::int64_t, 1> offsets, Output<double, 1> sums, Output<double, 1> mins,
                 Output<std::int64_t, 1> ids, Output<double, 1> values) {
  const fastrl::Tree tree = check_tree(offsets, sums, mins);
  const fastrl::Leaves leaves = check_leaves(bases, counts, tree);
  check_shape("ids", ids, {uniforms.shape(0)});
  check_shape("values", values, {uniforms.shape(0)});
  if (!(sums.data()[sums.shape(0) - 1] > 0))
    throw nb::value_error("sums: nothing to draw from, the total is not positive");
  nb::gil_scoped_release unlocked;
  fastrl::tree_sample(tree, leaves, uniforms.data(), uniforms.shape(0), ids.data(), values.data());
}

/// Defines a function none of whose arguments is converted.
template <class Function, class... Names>
void def_strict(nb::module_& module, const char* name, Function function, Names... names) {
  module.def(name, function, nb::arg(names).noconvert()...);
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
  def_strict(module, "replay_add", &replay_add, "obs", "row_actions", "row_rewards", "terminated", "truncated",
             "next_obs", "valid", "row", "bases", "counts", "running", "frames", "actions", "rewards", "flags",
             "final_index", "pending", "finals", "free_finals", "num_free", "ids");
  def_strict(module, "replay_draw", &replay_draw, "ends", "counts", "uniforms", "ids");
  def_strict(module, "replay_gather", &replay_gather, "ids", "gammas", "stack", "num_threads", "bases", "counts",
             "running", "frames", "actions", "rewards", "flags", "final_index", "pending", "finals", "free_finals",
             "num_free", "obs", "out_actions", "returns", "discounts", "next_obs");
  def_strict(module, "tree_update", &tree_update, "ids", "values", "leaf_bases", "counts", "offsets", "sums", "mins");
  def_strict(module, "tree_sample", &tree_sample, "uniforms", "leaf_bases", "counts", "offsets", "sums", "mins", "ids",
             "values");
}
