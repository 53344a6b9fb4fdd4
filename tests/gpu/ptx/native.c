/* What takes NumPy a dozen passes: fused multiply-adds, sums of matrix units, and the access histories of shared and global memory.
 * tests/gpu/ptx/native.py calls these functions. */
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

enum { ZERO = -300, LEAST = -126, MOST_COLUMNS = 256, MOST_DEPTH = 32 };

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

static int all_finite(const double *x, int64_t count) {
  int all = 1;
  for (int64_t i = 0; i < count; i++) all &= fabs(x[i]) <= 1.7976931348623157e308;
  return all;
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

/* c[groups, rows, columns] += a[groups, rows, depth] b[groups, columns, depth]. Returns 0 and changes nothing if a number is not finite. */
int software_gpu_products(const double *a, const double *b, float *c, int64_t groups, int64_t rows, int64_t columns, int64_t depth,
                          int64_t terms, int64_t least_a, int64_t least_b, int64_t fraction) {
  double lines[MOST_DEPTH * MOST_COLUMNS]; /* b of a group, [depth, columns] */
  if (!all_finite(a, groups * rows * depth) || !all_finite(b, groups * columns * depth)) return 0;
  for (int64_t i = 0; i < groups * rows * columns; i++)
    if (!(fabsf(c[i]) <= 3.4028234663852886e38f)) return 0;
  for (int64_t group = 0; group < groups; group++) {
    for (int64_t j = 0; j < columns; j++)
      for (int64_t k = 0; k < depth; k++) lines[k * columns + j] = b[(group * columns + j) * depth + k];
    for (int64_t i = 0; i < rows; i++)
      for (int64_t start = 0; start < depth; start += terms) {
        int64_t left = depth - start < terms ? depth - start : terms;
        row(a + (group * rows + i) * depth + start, lines + start * columns, c + (group * rows + i) * columns, (int)columns, (int)left,
            (int)least_a, (int)least_b, (int)fraction);
      }
  }
  return 1;
}

/* The access history of shared memory, as shadow.py describes it. The functions below return 0 and change nothing if an access is a fault;
 * shadow.py then finds out which one. */
struct shadow {
  int32_t *writer, *reader, *write_time, *read_time;
  int16_t *arriving, *leaving;
  uint8_t *generic;
  const int32_t *epoch, *warp_epoch;
  const int64_t *warp;
  int64_t grain_log2;
};
enum { NOBODY = -1, SEVERAL = -2, ASYNC = -3 };

static inline int apart(const struct shadow *s, int64_t own, int32_t other, int32_t time) {
  if (other == NOBODY || other == own) return 0;
  int32_t epoch = s->epoch[own];
  if (other >= 0 && s->warp[other] == s->warp[own] && s->warp_epoch[own] > epoch) epoch = s->warp_epoch[own];
  return epoch <= time;
}

/* Each thread reads `pieces` pieces from its offset on. */
int software_gpu_read(const struct shadow *s, const int64_t *threads, const int64_t *offsets, int64_t count, int64_t pieces, int32_t time) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> s->grain_log2, end = at + pieces; at < end; at++)
      if (s->arriving[at] > 0 || apart(s, threads[i], s->writer[at], s->write_time[at])) return 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t own = threads[i];
    int32_t epoch = s->epoch[own] > 1 ? s->epoch[own] : 1;
    for (int64_t at = offsets[i] >> s->grain_log2, end = at + pieces; at < end; at++) {
      int32_t before = s->reader[at];
      s->reader[at] = s->read_time[at] >= epoch && before != NOBODY && before != own ? SEVERAL : (int32_t)own;
      s->read_time[at] = time;
    }
  }
  return 1;
}

int software_gpu_overwrite(const struct shadow *s, const int64_t *threads, const int64_t *offsets, int64_t count, int64_t pieces) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> s->grain_log2, end = at + pieces; at < end; at++)
      if (s->arriving[at] > 0 || s->leaving[at] > 0 || apart(s, threads[i], s->writer[at], s->write_time[at]) ||
          apart(s, threads[i], s->reader[at], s->read_time[at]))
        return 0;
  return 1;
}

void software_gpu_written(const struct shadow *s, const int64_t *threads, const int64_t *offsets, int64_t count, int64_t pieces,
                          int32_t time) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> s->grain_log2, end = at + pieces; at < end; at++) {
      s->writer[at] = (int32_t)threads[i];
      s->write_time[at] = time;
      s->reader[at] = NOBODY;
      s->generic[at] = 1;
    }
}

/* A copy or product in flight, which `thread` has started, reads these pieces. */
int software_gpu_begin_reading(const struct shadow *s, int64_t thread, const int64_t *pieces, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    int64_t at = pieces[i];
    if (s->arriving[at] > 0 || s->generic[at] || apart(s, thread, s->writer[at], s->write_time[at])) return 0;
  }
  for (int64_t i = 0; i < count; i++) s->leaving[pieces[i]]++;
  return 1;
}

/* A copy that these threads have started is going to write these pieces. `asynchronous`: through the async proxy. */
int software_gpu_announce(const struct shadow *s, const int64_t *threads, const int64_t *offsets, int64_t count, int64_t pieces,
                          int asynchronous) {
  if (!software_gpu_overwrite(s, threads, offsets, count, pieces)) return 0;
  for (int64_t i = 0; asynchronous && i < count; i++)
    for (int64_t at = offsets[i] >> s->grain_log2, end = at + pieces; at < end; at++)
      if (s->generic[at]) return 0;
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> s->grain_log2, end = at + pieces; at < end; at++) s->arriving[at]++;
  return 1;
}

void software_gpu_arrive(const struct shadow *s, const int64_t *threads, const int64_t *offsets, int64_t count, int64_t pieces,
                         int32_t time, int asynchronous) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> s->grain_log2, end = at + pieces; at < end; at++) {
      s->arriving[at]--;
      s->writer[at] = asynchronous ? ASYNC : (int32_t)threads[i];
      s->write_time[at] = time;
      s->reader[at] = NOBODY;
      s->generic[at] = !asynchronous;
    }
}

/* The access history of global memory, as races.py describes it. */
struct races {
  int32_t *writer, *write_time, *reader, *read_time, *constant_time;
  const int32_t *number, *block, *epoch; /* of each thread of the wave */
  int64_t grain_log2, begin, per_block;
};
enum { MANY = -1 };

static inline int32_t block_of(const struct races *r, int32_t who) { return who >= 0 ? (int32_t)(who / r->per_block) : MANY - 1 - who; }

/* Whether a barrier of the block has ordered an access of other threads before what a thread does now. */
static inline int past(const struct races *r, int64_t thread, int32_t other, int32_t time) {
  return time < r->epoch[thread] && block_of(r, other) == r->block[thread];
}

static inline int unordered(const struct races *r, int64_t thread, int32_t other, int32_t time) {
  return time >= r->begin && other != r->number[thread] && !past(r, thread, other, time);
}

/* Returns 0 and changes nothing if only races.py can tell whether the access is a fault. */
int software_gpu_global_read(const struct races *r, const int64_t *threads, const int64_t *offsets, int64_t count, int64_t pieces,
                             int32_t time, int constant) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> r->grain_log2, end = at + pieces; at < end; at++)
      if (constant ? r->write_time[at] >= r->begin : unordered(r, threads[i], r->writer[at], r->write_time[at])) return 0;
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> r->grain_log2, end = at + pieces; at < end; at++) {
      int32_t who = r->number[threads[i]], before = r->reader[at];
      int32_t block = r->block[threads[i]];
      if (unordered(r, threads[i], before, r->read_time[at])) who = block_of(r, before) == block ? MANY - 1 - block : MANY;
      r->reader[at] = who;
      r->read_time[at] = time;
      if (constant) r->constant_time[at] = time;
    }
  return 1;
}

/* Returns 0 and changes nothing if only races.py can tell whether the access is a fault, and 2 if several threads write one piece. */
int software_gpu_global_write(const struct races *r, const int64_t *threads, const int64_t *offsets, int64_t count, int64_t pieces,
                              int32_t time) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> r->grain_log2, end = at + pieces; at < end; at++)
      if (r->constant_time[at] >= r->begin || unordered(r, threads[i], r->writer[at], r->write_time[at]) ||
          unordered(r, threads[i], r->reader[at], r->read_time[at]))
        return 0;
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> r->grain_log2, end = at + pieces; at < end; at++) {
      r->writer[at] = r->number[threads[i]];
      r->write_time[at] = time;
      r->read_time[at] = 0;
    }
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = offsets[i] >> r->grain_log2, end = at + pieces; at < end; at++)
      if (r->writer[at] != r->number[threads[i]]) return 2;
  return 1;
}
