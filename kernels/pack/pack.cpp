// Exact copies of rows of `bytes` bytes between a padded batch and the packed rows of its real tokens.
#include <cstdint>
#include <cstring>

extern "C" {

// packed[i] = padded[row[i]]
void pack_rows(const uint8_t* padded, const int64_t* row, uint8_t* packed, int64_t count, int64_t bytes) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) std::memcpy(packed + i * bytes, padded + row[i] * bytes, bytes);
}

// padded[row[i]] = packed[i]; other rows are untouched.
void unpack_rows(const uint8_t* packed, const int64_t* row, uint8_t* padded, int64_t count, int64_t bytes) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) std::memcpy(padded + row[i] * bytes, packed + i * bytes, bytes);
}
}
