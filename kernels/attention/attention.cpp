// Causal attention, forward over packed or paged keys and backward over packed ones. Every output is produced by one thread, and its
// bytes depend on its own row's position only: block sizes, batch neighbours, pages and threads change where work runs, not its order.
#include <vector>

#include "numerics.h"

using namespace rlk;

namespace {

constexpr int64_t kQueryBlock = 32;  // query rows that share one load of a key tile
constexpr int64_t kKeyBlock = 64;    // keys loaded at once by the backward; a multiple of kGroup
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline int64_t ceil_group(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }
inline float round_bf16(float value) { return from_bf16(to_bf16(value)); }

// acc[j] += one group of 16 products a[i]·rows[i][j], for n independent columns, each in the order of group_dot.
inline void accumulate_group(const float* __restrict a, const float* const* __restrict rows, float* __restrict acc, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    float t[8];
    for (int i = 0; i < 8; ++i) t[i] = std::fma(a[i], rows[i][j], a[i + 8] * rows[i + 8][j]);
    for (int i = 0; i < 4; ++i) t[i] += t[i + 4];
    for (int i = 0; i < 2; ++i) t[i] += t[i + 2];
    acc[j] += t[0] + t[1];
  }
}

// Contraction over `live` rows of b ([*, stride], columns n) in groups of 16 from row 0; rows outside [first, live) are +0 on both sides,
// so `a` holds +0 there. acc continues.
inline void accumulate(const float* a, const float* b, int64_t stride, int64_t first, int64_t live, const float* zeros, float* acc, int64_t n) {
  for (int64_t g = first / kGroup * kGroup; g < live; g += kGroup) {
    const float* rows[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) rows[i] = g + i >= first && g + i < live ? b + (g + i) * stride : zeros;
    accumulate_group(a + g, rows, acc, n);
  }
}

// Keys and values of one sequence and one kv head by logical position, packed (pages == nullptr) or through a page table.
struct KeyValues {
  const uint16_t *k, *v;
  int64_t slot_stride;
  const int32_t* pages;
  int64_t page_size, page_stride;

  int64_t at(int64_t position) const {
    if (!pages) return position * slot_stride;
    return int64_t(pages[position / page_size]) * page_stride + position % page_size * slot_stride;
  }
};

inline void load_row(const uint16_t* from, int64_t dim, float* row) {
  for (int64_t d = 0; d < dim; ++d) row[d] = from_bf16(from[d]);
}

inline void load_column(const uint16_t* from, int64_t dim, float* column, int64_t width) {
  for (int64_t d = 0; d < dim; ++d) column[d * width] = from_bf16(from[d]);
}

// Dot products of one vector with n columns of a transposed tile [dim16, width] in plain order over dim (filled with +0 to dim16).
inline void dots(const float* x, const float* columns, int64_t width, int64_t dim16, int64_t n, float* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = 0.0f;
  accumulate(x, columns, width, 0, dim16, nullptr, out, n);
}

// Unnormalised softmax state of one (query row, head). l == 0: no key seen yet.
struct State {
  float m = kMinusInfinity, l = 0.0f;
};

struct Shape {
  int64_t heads, kv_heads, dim, kv_tile, kv_split;
  float c;  // scale·log2(e)
  int64_t group() const { return heads / kv_heads; }
  int64_t dim16() const { return ceil_group(dim); }
};

// The row core: one (query row, head) takes in one tile of which it sees the first `visible` (>= 1) keys.
// keys: [dim16, kv_tile] transposed, values: [kv_tile, dim], t: scratch [kv_tile], zeros: [dim].
void attend_tile(State& state, float* o, const float* q, const float* keys, const float* values, int64_t visible, const Shape& shape, float* t,
                 const float* zeros) {
  const int64_t n = ceil_group(visible), dim = shape.dim;
  float ones[kGroup];
  std::fill_n(ones, kGroup, 1.0f);
  dots(q, keys, shape.kv_tile, shape.dim16(), n, t);
  for (int64_t j = 0; j < n; ++j) t[j] = j < visible ? t[j] * shape.c : kMinusInfinity;
  float m = state.m;
  for (int64_t j = 0; j < visible; ++j) m = std::max(m, t[j]);
  const float alpha = exp2_(state.m - m);
  for (int64_t j = 0; j < n; ++j) t[j] = round_bf16(exp2_(t[j] - m));
  for (int64_t d = 0; d < dim; ++d) o[d] *= alpha;
  accumulate(t, values, dim, 0, visible, zeros, o, dim);
  float l = state.l * alpha;
  for (int64_t g = 0; g < n; g += kGroup) l += group_dot(t + g, ones);
  state = {m, l};
}

// total ← total ∪ part, ascending; an empty side leaves the other's bytes alone.
void merge(State& total, float* total_o, State& part, float* part_o, int64_t dim) {
  if (part.l == 0.0f) return;
  if (total.l == 0.0f) {
    total = part;
    std::copy_n(part_o, dim, total_o);
  } else {
    const float m = std::max(total.m, part.m);
    const float first = exp2_(total.m - m), second = exp2_(part.m - m);
    for (int64_t d = 0; d < dim; ++d) total_o[d] = total_o[d] * first + part_o[d] * second;
    total = {m, total.l * first + part.l * second};
  }
  part = {};
  std::fill_n(part_o, dim, 0.0f);
}

// Consecutive rows of one sequence, queries or keys: `row` is the first one in its tensor, `position` its logical position. `other` is the
// row of position 0 in the tensor of the other side and `length` the sequence's length (both only where that side is packed).
struct Block {
  int64_t row, rows, position, other, length;
};

// Pieces of at most `step` rows, in order.
void append_blocks(std::vector<Block>& blocks, const Block& whole, int64_t step) {
  for (int64_t at = 0; at < whole.rows; at += step)
    blocks.push_back({whole.row + at, std::min(step, whole.rows - at), whole.position + at, whole.other, whole.length});
}

// All heads of one kv head for one query block. q, out: [tokens, heads, dim]; lse2: [tokens, heads] or nullptr.
void attend_block(const KeyValues& kv, const Block& block, int64_t kv_head, const Shape& shape, const uint16_t* q, uint16_t* out, float* lse2) {
  const int64_t dim = shape.dim, dim16 = shape.dim16(), tile = shape.kv_tile, group = shape.group(), states = block.rows * group;
  std::vector<float> queries(states * dim16), keys(dim16 * tile), values(tile * dim), t(tile), zeros(dim), o(states * dim), total_o(states * dim);
  std::vector<State> state(states), total(states);
  const auto head_of = [&](int64_t s) { return (block.row + s / group) * shape.heads + kv_head * group + s % group; };
  for (int64_t s = 0; s < states; ++s) load_row(q + head_of(s) * dim, dim, queries.data() + s * dim16);
  const int64_t end = block.position + block.rows;
  for (int64_t start = 0; start < end; start += tile) {
    if (shape.kv_split && start % shape.kv_split == 0)
      for (int64_t s = 0; s < states; ++s) merge(total[s], total_o.data() + s * dim, state[s], o.data() + s * dim, dim);
    for (int64_t j = 0; j < std::min(tile, end - start); ++j) {
      const int64_t at = kv.at(start + j);
      load_column(kv.k + at, dim, keys.data() + j, tile);
      load_row(kv.v + at, dim, values.data() + j * dim);
    }
    for (int64_t s = 0; s < states; ++s) {
      const int64_t visible = std::min(tile, block.position + s / group + 1 - start);
      if (visible > 0)
        attend_tile(state[s], o.data() + s * dim, queries.data() + s * dim16, keys.data(), values.data(), visible, shape, t.data(), zeros.data());
    }
  }
  for (int64_t s = 0; s < states; ++s) {
    float* sum = total_o.data() + s * dim;
    merge(total[s], sum, state[s], o.data() + s * dim, dim);
    for (int64_t d = 0; d < dim; ++d) out[head_of(s) * dim + d] = to_bf16(sum[d] / total[s].l);
    if (lse2) lse2[head_of(s)] = total[s].m + log2_(total[s].l);
  }
}

// P and dS of one (query row, head) against n columns, both rounded to bf16. p and ds hold the results.
inline void probabilities(const float* q, const float* d_out, const float* keys, const float* values, int64_t width, int64_t dim16, int64_t n, float c,
                          float lse2, float delta, float* p, float* ds) {
  dots(q, keys, width, dim16, n, p);
  dots(d_out, values, width, dim16, n, ds);
  for (int64_t j = 0; j < n; ++j) {
    const float probability = exp2_(p[j] * c - lse2);
    ds[j] = round_bf16(probability * (ds[j] - delta));
    p[j] = round_bf16(probability);
  }
}

struct Backward {
  const uint16_t *q, *k, *v, *d_out;
  const float *lse2, *delta;
  int64_t heads, kv_heads, dim;
  float c, scale;
};

// dQ of one query block and one query head: one accumulator per row, keys ascending from position 0.
void query_gradient(const Backward& in, const Block& block, int64_t head, uint16_t* dq) {
  const int64_t dim = in.dim, dim16 = ceil_group(dim), kv_head = head / (in.heads / in.kv_heads);
  std::vector<float> keys(kKeyBlock * dim), keys_t(dim16 * kKeyBlock), values_t(dim16 * kKeyBlock), zeros(dim);
  std::vector<float> queries(block.rows * dim16), d_outs(block.rows * dim16), sums(block.rows * dim);
  for (int64_t r = 0; r < block.rows; ++r) {
    load_row(in.q + ((block.row + r) * in.heads + head) * dim, dim, queries.data() + r * dim16);
    load_row(in.d_out + ((block.row + r) * in.heads + head) * dim, dim, d_outs.data() + r * dim16);
  }
  const int64_t end = block.position + block.rows;
  for (int64_t start = 0; start < end; start += kKeyBlock) {
    for (int64_t j = 0; j < std::min(kKeyBlock, end - start); ++j) {
      const int64_t at = ((block.other + start + j) * in.kv_heads + kv_head) * dim;
      load_row(in.k + at, dim, keys.data() + j * dim);
      load_column(in.k + at, dim, keys_t.data() + j, kKeyBlock);
      load_column(in.v + at, dim, values_t.data() + j, kKeyBlock);
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t visible = std::min(kKeyBlock, block.position + r + 1 - start);
      if (visible <= 0) continue;
      const int64_t n = ceil_group(visible), at = (block.row + r) * in.heads + head;
      float p[kKeyBlock], ds[kKeyBlock];
      probabilities(queries.data() + r * dim16, d_outs.data() + r * dim16, keys_t.data(), values_t.data(), kKeyBlock, dim16, n, in.c, in.lse2[at],
                    in.delta[at], p, ds);
      for (int64_t j = visible; j < n; ++j) ds[j] = 0.0f;
      accumulate(ds, keys.data(), dim, 0, visible, zeros.data(), sums.data() + r * dim, dim);
    }
  }
  for (int64_t r = 0; r < block.rows; ++r)
    for (int64_t d = 0; d < dim; ++d) dq[((block.row + r) * in.heads + head) * dim + d] = to_bf16(sums[r * dim + d] * in.scale);
}

// dK and dV of one key block and one kv head: one accumulator each, query heads ascending, then groups of 16 queries from position 0.
// Groups before the block see none of its keys and are skipped.
void key_gradient(const Backward& in, const Block& block, int64_t kv_head, uint16_t* dk, uint16_t* dv) {
  const int64_t dim = in.dim, dim16 = ceil_group(dim), group = in.heads / in.kv_heads, n = ceil_group(block.rows);
  std::vector<float> keys_t(dim16 * kKeyBlock), values_t(dim16 * kKeyBlock), zeros(dim), dk_sums(block.rows * dim), dv_sums(block.rows * dim);
  std::vector<float> queries(kGroup * dim16), d_outs(kGroup * dim16), p(kGroup * kKeyBlock), ds(kGroup * kKeyBlock);
  for (int64_t j = 0; j < block.rows; ++j) {
    const int64_t at = ((block.row + j) * in.kv_heads + kv_head) * dim;
    load_column(in.k + at, dim, keys_t.data() + j, kKeyBlock);
    load_column(in.v + at, dim, values_t.data() + j, kKeyBlock);
  }
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t base = block.position / kGroup * kGroup; base < block.length; base += kGroup) {
      const int64_t live = std::min(kGroup, block.length - base);
      for (int64_t i = 0; i < live; ++i) {
        const int64_t at = (block.other + base + i) * in.heads + head;
        load_row(in.q + at * dim, dim, queries.data() + i * dim16);
        load_row(in.d_out + at * dim, dim, d_outs.data() + i * dim16);
        probabilities(queries.data() + i * dim16, d_outs.data() + i * dim16, keys_t.data(), values_t.data(), kKeyBlock, dim16, n, in.c, in.lse2[at],
                      in.delta[at], p.data() + i * kKeyBlock, ds.data() + i * kKeyBlock);
      }
      for (int64_t j = 0; j < block.rows && block.position + j < base + live; ++j) {
        const int64_t first = std::max<int64_t>(0, block.position + j - base);  // earlier queries do not see the key
        float weights[kGroup], slopes[kGroup];
        for (int64_t i = 0; i < kGroup; ++i) {
          const bool sees = i >= first && i < live;
          weights[i] = sees ? p[i * kKeyBlock + j] : 0.0f;
          slopes[i] = sees ? ds[i * kKeyBlock + j] : 0.0f;
        }
        accumulate(weights, d_outs.data(), dim16, first, live, zeros.data(), dv_sums.data() + j * dim, dim);
        accumulate(slopes, queries.data(), dim16, first, live, zeros.data(), dk_sums.data() + j * dim, dim);
      }
    }
  for (int64_t j = 0; j < block.rows; ++j)
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t at = ((block.row + j) * in.kv_heads + kv_head) * dim + d;
      dk[at] = to_bf16(dk_sums[j * dim + d] * in.scale);
      dv[at] = to_bf16(dv_sums[j * dim + d]);
    }
}

// segments: [count, 5] rows of Block.
std::vector<Block> blocks_of(const int64_t* segments, int64_t count, int64_t step) {
  std::vector<Block> blocks;
  for (const int64_t* s = segments; s < segments + 5 * count; s += 5) append_blocks(blocks, {s[0], s[1], s[2], s[3], s[4]}, step);
  return blocks;
}

}  // namespace

extern "C" {

// q, out: [query rows, heads, dim] bf16; k, v: [key rows, kv_heads, dim] bf16; lse2: [query rows, heads] fp32; segments: queries.
void attention_forward(const uint16_t* q, const uint16_t* k, const uint16_t* v, const int64_t* segments, uint16_t* out, float* lse2, int64_t count,
                       int64_t heads, int64_t kv_heads, int64_t dim, int64_t kv_tile, int64_t kv_split, float c) {
  const Shape shape{heads, kv_heads, dim, kv_tile, kv_split, c};
  const std::vector<Block> blocks = blocks_of(segments, count, kQueryBlock);
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (size_t b = 0; b < blocks.size(); ++b)
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t at = (blocks[b].other * kv_heads + h) * dim;
      attend_block({k + at, v + at, kv_heads * dim, nullptr, 0, 0}, blocks[b], h, shape, q, out, lse2);
    }
}

// kv_cache: [pages, kv_heads, page_size, 2·dim] bf16 (K then V) with the given strides in elements; block_table: [sequences, max_blocks];
// query_start_loc: [sequences+1]; seq_lens: [sequences]; the query rows are the last rows of each sequence.
void attention_paged(const uint16_t* q, const uint16_t* kv_cache, const int32_t* block_table, const int64_t* query_start_loc, const int64_t* seq_lens,
                     uint16_t* out, int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page_size,
                     int64_t page_stride, int64_t head_stride, int64_t slot_stride, int64_t kv_tile, int64_t kv_split, float c) {
  const Shape shape{heads, kv_heads, dim, kv_tile, kv_split, c};
  std::vector<Block> blocks;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t first = query_start_loc[s], rows = query_start_loc[s + 1] - first;
    append_blocks(blocks, {first, rows, seq_lens[s] - rows, s * max_blocks, seq_lens[s]}, kQueryBlock);  // other: the sequence's page table
  }
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (size_t b = 0; b < blocks.size(); ++b)
    for (int64_t h = 0; h < kv_heads; ++h) {
      const uint16_t* k = kv_cache + h * head_stride;
      attend_block({k, k + dim, slot_stride, block_table + blocks[b].other, page_size, page_stride}, blocks[b], h, shape, q, out, nullptr);
    }
}

// delta: [rows] fp32 = Σ dO·O of each of `rows` (query row, head) by row tree.
void attention_delta(const uint16_t* out, const uint16_t* d_out, float* delta, int64_t rows, int64_t dim) {
#pragma omp parallel
  {
    std::vector<float> scratch(next_power_of_two(dim));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t d = 0; d < dim; ++d) scratch[d] = from_bf16(out[i * dim + d]) * from_bf16(d_out[i * dim + d]);
      delta[i] = row_tree_sum(scratch.data(), dim);
    }
  }
}

// dQ of the queries of `segments`; shapes as in attention_forward, lse2 and delta by query row.
void attention_query_gradient(const uint16_t* q, const uint16_t* k, const uint16_t* v, const uint16_t* d_out, const float* lse2, const float* delta,
                              const int64_t* segments, uint16_t* dq, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, float c,
                              float scale) {
  const Backward in{q, k, v, d_out, lse2, delta, heads, kv_heads, dim, c, scale};
  const std::vector<Block> blocks = blocks_of(segments, count, kQueryBlock);
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (size_t b = 0; b < blocks.size(); ++b)
    for (int64_t h = 0; h < heads; ++h) query_gradient(in, blocks[b], h, dq);
}

// dK and dV of the keys of `segments`; q, d_out, lse2 and delta hold every query of their sequences.
void attention_key_gradient(const uint16_t* q, const uint16_t* k, const uint16_t* v, const uint16_t* d_out, const float* lse2, const float* delta,
                            const int64_t* segments, uint16_t* dk, uint16_t* dv, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, float c,
                            float scale) {
  const Backward in{q, k, v, d_out, lse2, delta, heads, kv_heads, dim, c, scale};
  const std::vector<Block> blocks = blocks_of(segments, count, kKeyBlock);
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (size_t b = 0; b < blocks.size(); ++b)
    for (int64_t h = 0; h < kv_heads; ++h) key_gradient(in, blocks[b], h, dk, dv);
}
}
