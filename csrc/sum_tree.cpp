#include <algorithm>
#include <limits>

#include "kernels.h"

namespace fastrl {
namespace {

constexpr std::size_t kFanOut = 8;

// One fixed order of additions, the same in every kernel: a node depends on its children alone, so nothing drifts.
double sum_of_children(const double* c) { return ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7])); }

double least_child(const double* c) { return *std::min_element(c, c + kFanOut); }

std::size_t leaf_of(const Leaves& leaves, std::int64_t id) {
  const auto num_envs = static_cast<std::int64_t>(leaves.num_envs);
  const std::int64_t n = id % num_envs, q = id / num_envs;
  return static_cast<std::size_t>(leaves.bases[n] + q % (leaves.bases[n + 1] - leaves.bases[n]));
}

bool is_live(const Leaves& leaves, std::int64_t id) {
  const auto num_envs = static_cast<std::int64_t>(leaves.num_envs);
  const std::int64_t n = id % num_envs, q = id / num_envs, count = leaves.counts[n];
  return id >= 0 && q < count && q >= count - (leaves.bases[n + 1] - leaves.bases[n]);
}

// The newest transition that has this leaf.
std::int64_t id_of(const Leaves& leaves, std::size_t leaf_) {
  const auto leaf = static_cast<std::int64_t>(leaf_);
  const std::int64_t* above = std::upper_bound(leaves.bases, leaves.bases + leaves.num_envs + 1, leaf);
  const std::int64_t n = above - leaves.bases - 1;
  const std::int64_t length = leaves.bases[n + 1] - leaves.bases[n], newest = leaves.counts[n] - 1;
  const std::int64_t residue = leaf - leaves.bases[n], newest_residue = newest % length;
  const std::int64_t back = newest_residue >= residue ? newest_residue - residue : newest_residue - residue + length;
  return (newest - back) * static_cast<std::int64_t>(leaves.num_envs) + n;
}

// The child of eight in which the target falls; the target is then counted from that child's start.
std::size_t child_at(const double* child, double& target) {
  std::size_t last = 0;
  for (std::size_t i = 0; i < kFanOut; ++i) {
    if (child[i] > 0) last = i;
    if (target < child[i]) return i;
    target -= child[i];
  }
  // Rounding can carry the target past the last child: take the last one that holds anything.
  target = child[last];
  return last;
}

}  // namespace

void tree_update(const Tree& tree, const Leaves& leaves, const std::int64_t* ids, const double* values,
                 std::size_t batch, std::int64_t* nodes) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < batch; ++i) {
    if (!is_live(leaves, ids[i])) continue;
    const std::size_t leaf = leaf_of(leaves, ids[i]);
    tree.sums[leaf] = values[i];
    if (tree.mins) tree.mins[leaf] = values[i];
    nodes[kept++] = static_cast<std::int64_t>(leaf);
  }
  // Level by level, so that the loads of one level overlap; neighbours share their parents.
  for (std::size_t level = 0; level + 1 < tree.num_levels; ++level) {
    const std::size_t below = tree.offsets[level], here = tree.offsets[level + 1];
    std::size_t parents = 0;
    for (std::size_t i = 0; i < kept; ++i) {
      const std::int64_t parent = nodes[i] / static_cast<std::int64_t>(kFanOut);
      if (parents && nodes[parents - 1] == parent) continue;
      nodes[parents++] = parent;
      const std::size_t children = below + static_cast<std::size_t>(parent) * kFanOut;
      tree.sums[here + static_cast<std::size_t>(parent)] = sum_of_children(tree.sums + children);
      if (tree.mins) tree.mins[here + static_cast<std::size_t>(parent)] = least_child(tree.mins + children);
    }
    kept = parents;
  }
}

void tree_sample(const Tree& tree, const Leaves& leaves, const double* uniforms, std::size_t batch, std::int64_t* ids,
                 double* values) {
  const double total = tree.sums[tree.offsets[tree.num_levels - 1]];
  const double width = total / static_cast<double>(batch);
  std::int64_t* nodes = ids;
  double* targets = values;
  for (std::size_t i = 0; i < batch; ++i) {
    nodes[i] = 0;
    targets[i] = (static_cast<double>(i) + uniforms[i]) * width;
  }
  // All draws descend together, each asking for the memory that it reads one level later.
  for (std::size_t level = tree.num_levels - 1; level-- > 0;) {
    const double* sums = tree.sums + tree.offsets[level];
    for (std::size_t i = 0; i < batch; ++i) {
      const std::size_t first = static_cast<std::size_t>(nodes[i]) * kFanOut;
      const std::size_t node = first + child_at(sums + first, targets[i]);
      nodes[i] = static_cast<std::int64_t>(node);
      if (level) __builtin_prefetch(tree.sums + tree.offsets[level - 1] + node * kFanOut);
    }
  }
  for (std::size_t i = 0; i < batch; ++i) {
    const auto leaf = static_cast<std::size_t>(nodes[i]);
    ids[i] = id_of(leaves, leaf);
    values[i] = tree.sums[leaf];
  }
}

}  // namespace fastrl
