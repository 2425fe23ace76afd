// out[m, n] = Σ_k a[m, k]·b[n, k] in plain, split or token order: the one contraction behind forward, input gradient and weight gradient.
//
// Every element takes the same scalar steps whatever tile, thread or path computes it: per leaf one accumulator from +0, per group of 16 k
// one add of group_dot's tree, leaves joined by the tree of adjacent pairs. Vectors only run that sequence for several elements at once.
// Two paths share it: `packed_block` (tiles of b widened to fp32, any shape) and `direct_block` (few rows, b read in place).
#include <omp.h>

#include <memory>

#include "numerics.h"
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define RLK_AVX2 1
#endif

using namespace rlk;

#define RLK_INLINE inline __attribute__((always_inline))

namespace {

typedef float F8 __attribute__((vector_size(32)));
typedef double D4 __attribute__((vector_size(32)));
typedef uint32_t W8 __attribute__((vector_size(32)));
typedef uint32_t W4 __attribute__((vector_size(16)));
typedef uint16_t H8 __attribute__((vector_size(16)));

struct alignas(64) Line {
  float at[16];
};

constexpr int64_t kPanel = 24;        // columns of one packed panel: three vectors
constexpr int64_t kDepth = 256;       // k of one packed panel, 24 KiB: stays in the first-level cache
constexpr int64_t kRows = 128;        // rows of one task
constexpr int64_t kPanels = 10;       // panels of one task, at most
constexpr int64_t kDirectRows = 4;    // up to this many rows, packing b costs more than it saves
constexpr int64_t kDirectDepth = 4096;
static_assert(kPanel % 8 == 0 && kDepth % kGroup == 0 && kDirectDepth % kGroup == 0, "an accumulator rests at group edges only");

// `rows` × k elements; element (row, k) lies at row·ld + k, or at k·ld + row when transposed.
struct Operand {
  const uint16_t* data;
  int64_t rows, ld;
  bool transposed;
};

template <class T>
RLK_INLINE T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
RLK_INLINE void store(void* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// The two places where GCC does not find the one instruction by itself.
RLK_INLINE F8 fma8(F8 a, F8 b, F8 c) {
#ifdef RLK_AVX2
  return F8(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
  F8 value;
  for (int i = 0; i < 8; ++i) value[i] = std::fma(a[i], b[i], c[i]);
  return value;
#endif
}

RLK_INLINE F8 widen(H8 bf16) {
#ifdef RLK_AVX2
  return F8(_mm256_slli_epi32(_mm256_cvtepu16_epi32(__m128i(bf16)), 16));
#else
  return F8(__builtin_convertvector(bf16, W8) << 16);
#endif
}

// Two adjacent floats, four times over.
RLK_INLINE F8 twice_four(const float* from) {
  const double both = load<double>(from);
  return F8(D4{both, both, both, both});
}

// The tree's last level: x holds pairs of partial sums of columns 0, 1, 4, 5 and y of columns 2, 3, 6, 7; the result is columns 0 to 7.
RLK_INLINE F8 add_neighbours(F8 x, F8 y) {
  return __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14) + __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
}

RLK_INLINE void transpose_8x8(H8* t) {
  for (int step = 0; step < 3; ++step) {
    H8 next[8];
    for (int i = 0; i < 4; ++i) {
      next[2 * i] = __builtin_shufflevector(t[i], t[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      next[2 * i + 1] = __builtin_shufflevector(t[i], t[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; ++i) t[i] = next[i];
  }
}

// At most 8 elements, the rest +0, never reading past them.
RLK_INLINE H8 load_some(const uint16_t* from, int64_t count) {
  if (count >= 8) return load<H8>(from);
  uint16_t some[8] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = from[i];
  return load<H8>(some);
}

// Rows row … row+7 of the group of `count` ≤ 16 positions from `position`: tile[j][0] is k 0–7 of row j, tile[j][1] is k 8–15; the rest is +0.
RLK_INLINE void gather(const Operand& x, int64_t row, const int64_t* index, int64_t position, int64_t count, H8 tile[8][2]) {
  const int64_t rows = std::min<int64_t>(8, x.rows - row);
  if (!x.transposed) {
    for (int64_t j = 0; j < 8; ++j) {
      const uint16_t* from = x.data + (row + j) * x.ld + position;
      tile[j][0] = load_some(from, j < rows ? count : 0);
      tile[j][1] = load_some(from + 8, j < rows ? count - 8 : 0);
    }
    return;
  }
  for (int64_t half = 0; half < 2; ++half) {
    H8 lines[8];
    for (int64_t i = 0; i < 8; ++i) {
      const int64_t at = 8 * half + i;
      const int64_t k = at >= count ? -1 : index ? index[position + at] : position + at;
      lines[i] = k < 0 ? H8{} : load_some(x.data + k * x.ld + row, rows);
    }
    transpose_8x8(lines);
    for (int64_t j = 0; j < 8; ++j) tile[j][half] = lines[j];
  }
}

// to[row][16·groups] fp32.
void pack_rows(const Operand& x, int64_t row, int64_t rows, const int64_t* index, int64_t position, int64_t last, float* to) {
  const int64_t groups = (last - position + kGroup - 1) / kGroup;
  for (int64_t r = 0; r < rows; r += 8)
    for (int64_t g = 0; g < groups; ++g) {
      H8 tile[8][2];
      gather(x, row + r, index, position + g * kGroup, std::min(kGroup, last - position - g * kGroup), tile);
      for (int64_t j = 0; j < std::min<int64_t>(8, rows - r); ++j) {
        float* line = to + ((r + j) * groups + g) * kGroup;
        store(line, widen(tile[j][0]));
        store(line + 8, widen(tile[j][1]));
      }
    }
}

// One panel of b. Per group and eight columns: two quads (columns 0, 1, 4, 5 and 2, 3, 6, 7) of eight vectors; vector i of a quad holds
// k 2i and 2i+1 of its four columns.
void pack_panel(const Operand& x, int64_t row, const int64_t* index, int64_t position, int64_t last, float* to) {
  for (; position < last; position += kGroup)
    for (int64_t v = 0; v < kPanel; v += 8) {
      H8 tile[8][2];
      gather(x, row + v, index, position, std::min(kGroup, last - position), tile);
      for (int64_t quad = 0; quad < 4; quad += 2)
        for (int64_t half = 0; half < 2; ++half, to += 32) {
          const W4 a = W4(tile[quad][half]), b = W4(tile[quad + 1][half]), c = W4(tile[quad + 4][half]), d = W4(tile[quad + 5][half]);
          const W4 ac = __builtin_shufflevector(a, c, 0, 4, 1, 5), bd = __builtin_shufflevector(b, d, 0, 4, 1, 5);
          const W4 ca = __builtin_shufflevector(a, c, 2, 6, 3, 7), db = __builtin_shufflevector(b, d, 2, 6, 3, 7);
          store(to, widen(H8(__builtin_shufflevector(ac, bd, 0, 4, 1, 5))));
          store(to + 8, widen(H8(__builtin_shufflevector(ac, bd, 2, 6, 3, 7))));
          store(to + 16, widen(H8(__builtin_shufflevector(ca, db, 0, 4, 1, 5))));
          store(to + 24, widen(H8(__builtin_shufflevector(ca, db, 2, 6, 3, 7))));
        }
    }
}

// One row of a against one panel. Lanes hold neighbouring k of four columns, so two of the tree's three adding levels need no shuffle.
void panel_row(const float* a, const float* panel, float* acc, int64_t groups) {
  F8 sum[kPanel / 8];
  for (int64_t v = 0; v < kPanel / 8; ++v) sum[v] = load<F8>(acc + 8 * v);
  for (int64_t g = 0; g < groups; ++g, a += kGroup) {
    F8 x[8];
    for (int i = 0; i < 8; ++i) x[i] = twice_four(a + 2 * i);
    for (int64_t v = 0; v < kPanel / 8; ++v) {
      F8 quads[2];
      for (int q = 0; q < 2; ++q, panel += 64) {
        auto terms = [&](int i) { return fma8(x[i], load<F8>(panel + 8 * i), x[i + 4] * load<F8>(panel + 8 * i + 32)); };
        quads[q] = (terms(0) + terms(2)) + (terms(1) + terms(3));
      }
      sum[v] += add_neighbours(quads[0], quads[1]);
    }
  }
  for (int64_t v = 0; v < kPanel / 8; ++v) store(acc + 8 * v, sum[v]);
}

// R rows of a against eight columns of b read in place: lanes hold the group's tree, so b needs no packing.
template <int R>
void direct_columns(const float* a, int64_t stride, const uint16_t* const b[8], int64_t groups, float* acc, int64_t width) {
  F8 sum[R];
  for (int r = 0; r < R; ++r) sum[r] = load<F8>(acc + r * width);
  for (int64_t k = 0; k < groups * kGroup; k += kGroup) {
    F8 tree[3][R], other[R];
    auto column = [&](int j, F8* t) {
      const F8 low = widen(load<H8>(b[j] + k)), high = widen(load<H8>(b[j] + k + 8));
      for (int r = 0; r < R; ++r) t[r] = fma8(load<F8>(a + r * stride + k), low, load<F8>(a + r * stride + k + 8) * high);
    };
    auto first_level = [&](int j, F8* t) {  // columns j and j + 4
      column(j, t);
      column(j + 4, other);
      for (int r = 0; r < R; ++r) {
        const F8 x = t[r], y = other[r];
        t[r] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
      }
    };
    auto second_level = [&](F8* t, const F8* u) {
      for (int r = 0; r < R; ++r) {
        const F8 x = t[r], y = u[r];
        t[r] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
      }
    };
    first_level(0, tree[0]);
    first_level(1, tree[1]);
    second_level(tree[0], tree[1]);
    first_level(2, tree[1]);
    first_level(3, tree[2]);
    second_level(tree[1], tree[2]);
    for (int r = 0; r < R; ++r) sum[r] += add_neighbours(tree[0][r], tree[1][r]);
  }
  for (int r = 0; r < R; ++r) store(acc + r * width, sum[r]);
}

struct Product {
  Operand a, b;
  const int64_t *index, *offsets;
  int64_t leaves, k;
  void* out;
  bool bf16;
};

struct Tile {
  int64_t row, rows, column, width;  // width: columns filled up to whole panels
};

// acc[rows][width] goes on through positions first … last of one leaf.
void packed_block(const Product& p, const Tile& t, int64_t first, int64_t last, float* acc, float* rows, float* panel) {
  for (; first < last; first += kDepth) {
    const int64_t end = std::min(first + kDepth, last), groups = (end - first + kGroup - 1) / kGroup;
    pack_rows(p.a, t.row, t.rows, p.index, first, end, rows);
    for (int64_t c = 0; c < t.width; c += kPanel) {
      pack_panel(p.b, t.column + c, p.index, first, end, panel);
      for (int64_t r = 0; r < t.rows; ++r) panel_row(rows + r * groups * kGroup, panel, acc + r * t.width + c, groups);
    }
  }
}

void direct_block(const Product& p, const Tile& t, int64_t first, int64_t last, float* acc, float* rows) {
  constexpr decltype(&direct_columns<1>) kernels[] = {direct_columns<1>, direct_columns<2>, direct_columns<3>, direct_columns<4>};
  const auto kernel = kernels[t.rows - 1];
  for (; first < last; first += kDirectDepth) {
    const int64_t depth = std::min(kDirectDepth, last - first), whole = depth / kGroup * kGroup;
    const int64_t stride = (depth + kGroup - 1) / kGroup * kGroup;
    pack_rows(p.a, t.row, t.rows, nullptr, first, first + depth, rows);
    for (int64_t c = 0; c < t.width; c += 8) {
      const uint16_t* lines[8];
      for (int64_t j = 0; j < 8; ++j) lines[j] = p.b.data + std::min(t.column + c + j, p.b.rows - 1) * p.b.ld + first;
      kernel(rows, stride, lines, whole / kGroup, acc + c, t.width);
      if (whole == depth) continue;
      uint16_t tail[8][kGroup] = {};
      for (int64_t j = 0; j < 8; ++j) {
        std::memcpy(tail[j], lines[j] + whole, 2 * (depth - whole));
        lines[j] = tail[j];
      }
      kernel(rows + whole, stride, lines, 1, acc + c, t.width);
    }
  }
}

// A NaN's payload depends on the order of an addition's operands, which a compiler may swap: every NaN becomes the same one.
void store_tile(const Product& p, const Tile& t, const float* acc) {
  const int64_t n = p.b.rows, columns = std::min(t.width, n - t.column);
  for (int64_t r = 0; r < t.rows; ++r) {
    const float* from = acc + r * t.width;
    const int64_t at = (t.row + r) * n + t.column;
    for (int64_t c = 0; c < columns; ++c) {
      const float value = from[c] != from[c] ? from_bits(0x7fc00000u) : from[c];
      if (p.bf16)
        static_cast<uint16_t*>(p.out)[at + c] = to_bf16(value);
      else
        static_cast<float*>(p.out)[at + c] = value;
    }
  }
}

// parts: room for 1 + log2(leaves) tiles of accumulators.
void run_tile(const Product& p, const Tile& t, float* parts, float* rows, float* panel) {
  const int64_t size = t.rows * t.width;
  int64_t open = 0;
  for (int64_t l = 0; l < p.leaves; ++l) {
    float* acc = parts + open++ * size;
    std::fill(acc, acc + size, 0.0f);
    const int64_t first = p.offsets ? p.offsets[l] : l * (p.k / p.leaves), last = p.offsets ? p.offsets[l + 1] : first + p.k / p.leaves;
    if (panel)
      packed_block(p, t, first, last, acc, rows, panel);
    else
      direct_block(p, t, first, last, acc, rows);
    for (int64_t done = l; done & 1; done >>= 1) {  // a finished pair of equal subtrees is joined at once
      float *left = parts + (open - 2) * size, *right = left + size;
      for (int64_t i = 0; i < size; ++i) left[i] += right[i];
      --open;
    }
  }
  store_tile(p, t, parts);
}

}  // namespace

extern "C" {

// out[m][n] = Σ a·b over k, bf16 or fp32. An operand is [rows][k], or [k][rows] when transposed. Leaf l is the positions
// offsets[l] … offsets[l+1], or one of `leaves` (a power of two) equal pieces of k when offsets is null. Position p means k = index[p]
// (−1: +0), or k = p when index is null; an index needs both operands transposed.
void det_gemm(const uint16_t* a, int64_t a_transposed, const uint16_t* b, int64_t b_transposed, const int64_t* index, const int64_t* offsets,
              int64_t leaves, void* out, int64_t bf16, int64_t m, int64_t n, int64_t k) {
  const Product p{{a, m, a_transposed ? m : k, a_transposed != 0}, {b, n, b_transposed ? n : k, b_transposed != 0},
                  index, offsets, leaves, k, out, bf16 != 0};
  const bool direct = m <= kDirectRows && !a_transposed && !b_transposed;
  const int64_t threads = omp_get_max_threads(), panels = (n + kPanel - 1) / kPanel, row_tiles = (m + kRows - 1) / kRows;
  const int64_t panels_each = std::max<int64_t>(1, std::min(kPanels, panels * row_tiles / (2 * threads)));
  const int64_t column_tiles = (panels + panels_each - 1) / panels_each, rows_each = std::min(kRows, m);
  int64_t levels = 1;
  for (int64_t count = leaves; count > 1; count /= 2) ++levels;
  const int64_t parts_size = levels * rows_each * panels_each * kPanel, rows_size = rows_each * (direct ? kDirectDepth : kDepth);
#pragma omp parallel if (row_tiles * column_tiles > 1)
  {
    const auto lines = [](int64_t floats) { return std::unique_ptr<Line[]>(new Line[(floats + 15) / 16]); };
    const auto parts = lines(parts_size), rows = lines(rows_size), panel = lines(kPanel * kDepth);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t c = 0; c < column_tiles; ++c)
      for (int64_t r = 0; r < row_tiles; ++r) {
        const int64_t row = r * kRows, first = c * panels_each;
        const Tile t{row, std::min(kRows, m - row), first * kPanel, std::min(panels_each, panels - first) * kPanel};
        run_tile(p, t, parts[0].at, rows[0].at, direct ? nullptr : panel[0].at);
      }
  }
}
}
