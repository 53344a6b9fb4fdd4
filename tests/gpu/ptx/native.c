/* Fused multiply-adds and sums of matrix units, for which NumPy needs a dozen passes each: tests/gpu/ptx/native.py calls these functions. */
#include <math.h>
#include <stdint.h>
#include <string.h>

void software_gpu_fma(const float *restrict a, const float *restrict b, const float *restrict c, float *restrict out, int64_t count) {
  const uint32_t canonical = 0x7fffffff; /* the NaN that a GPU returns for any other */
  for (int64_t i = 0; i < count; i++) {
    float sum = fmaf(a[i], b[i], c[i]);
    if (sum != sum) memcpy(&sum, &canonical, sizeof sum);
    out[i] = sum;
  }
}

enum { ZERO = -300, LEAST = -126, MOST_COLUMNS = 256 };

static inline int exponent(double x, int least) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int found = (int)(bits >> 52 & 0x7ff) - 1023;
  return x == 0 ? ZERO : found < least ? least : found;
}

static inline double power(int exponent) {
  int64_t bits = (int64_t)(exponent + 1023) << 52;
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* One row of c[columns] += the sum over k of a[k] b[k, columns], as rounding.py defines it; all numbers are finite. */
static void row(const double *restrict a, const double *restrict b, float *restrict c, int columns, int depth, int least_a, int least_b,
                int fraction) {
  int largest[MOST_COLUMNS];
  double scale[MOST_COLUMNS], total[MOST_COLUMNS];
  uint32_t kept = fraction < 23 ? ~((1u << (23 - fraction)) - 1) : ~0u; /* the bits of a result that has `fraction` binary places */
  for (int j = 0; j < columns; j++) {
    int own = exponent(c[j], LEAST);
    largest[j] = own > LEAST ? own : LEAST;
  }
  for (int k = 0; k < depth; k++) {
    int first = exponent(a[k], least_a);
    for (int j = 0; j < columns; j++) {
      int both = first + exponent(b[k * columns + j], least_b);
      largest[j] = both > largest[j] ? both : largest[j];
    }
  }
  for (int j = 0; j < columns; j++) {
    scale[j] = power(fraction - largest[j]);
    total[j] = trunc(c[j] * scale[j]);
  }
  for (int k = 0; k < depth; k++)
    for (int j = 0; j < columns; j++) total[j] += trunc(a[k] * b[k * columns + j] * scale[j]);
  for (int j = 0; j < columns; j++) {
    double value = total[j] * power(largest[j] - fraction);
    float rounded = (float)value; /* to nearest */
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    bits -= fabs((double)rounded) > fabs(value); /* the next number toward zero */
    bits &= kept;
    memcpy(&c[j], &bits, sizeof bits);
  }
}

/* c[groups, rows, columns] += a[groups, rows, depth] b[groups, depth, columns]. */
void software_gpu_products(const double *a, const double *b, float *c, int64_t groups, int64_t rows, int64_t columns, int64_t depth,
                           int64_t terms, int64_t least_a, int64_t least_b, int64_t fraction) {
  for (int64_t group = 0; group < groups; group++)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t start = 0; start < depth; start += terms) {
        int64_t left = depth - start < terms ? depth - start : terms;
        row(a + (group * rows + i) * depth + start, b + (group * depth + start) * columns, c + (group * rows + i) * columns, (int)columns,
            (int)left, (int)least_a, (int)least_b, (int)fraction);
      }
}
