/* What native.c offers to operations of TensorFlow; native.py calls the rest as well. */
#ifndef HVD_GRADCOMP_NATIVE_H
#define HVD_GRADCOMP_NATIVE_H

#include <stdint.h>

/* `rows` groups of `length` neighbours each; see bands.py. */
typedef struct {
  int64_t start, rows, length;
} band;

/* A number within the words of a frame: which word, from which bit, of how many bits. */
typedef struct {
  int64_t word, low, bits;
} field;

/* u = momentum * u0 + g, r = r0 + u, or a step ahead. r0 may be r, and u0 u. */
void add_momentum(float *r, float *u, const float *r0, const float *u0, const float *g, int64_t n,
                  float momentum, int nesterov);
void add_vectors(const float *x, const float *y, float *out, int64_t n);
void bit_planes(const int64_t *groups, int64_t m, int bits, int64_t *planes);
void from_bit_planes(const int64_t *planes, int64_t m, int bits, int64_t *groups);
int all_finite(const float *x, int64_t n, int threads);
void layer_histograms(const int64_t *offsets, const int64_t *sizes, int64_t layers, const float *x,
                      int64_t bins, int64_t *counts, int threads);
void reverse(const float *x, int64_t a, int64_t b, int64_t c, int64_t x_apart, float *out,
             int64_t out_apart, int past, int threads);
uint32_t weighted_sum(const uint32_t *words, int64_t n, int threads);
uint32_t frame_sum(const uint32_t *words, int64_t count, const uint32_t *body, int64_t n,
                   int threads);
void examine(const uint32_t *frames, int64_t rows, int64_t stride, int64_t length, int64_t count,
             const field *fields, int64_t number, const int64_t *expected, int64_t *words,
             uint8_t *held, int threads);
void group_maxima(const band *bands, int64_t count, const float *x, float *out, int threads);
int group_squares(const band *bands, int64_t count, const float *x, float *out, int threads);
void encode_levels(const band *bands, int64_t count, const float *x, int64_t n, const float *scale,
                   int bits, uint32_t key1, uint32_t key2, uint32_t *words, int threads);
void add_levels(const band *bands, int64_t count, const float *base, float *out, int64_t n,
                int64_t ranks, const uint32_t *words, int64_t word_stride, const float *scale,
                int64_t scale_stride, int bits, const float *weights, int threads);
int encode_signs(const band *bands, int64_t count, const float *x, int64_t n, float *above,
                 float *below, uint32_t *words, int threads);
void add_signs(const band *bands, int64_t count, const float *base, float *out, int64_t n,
               int64_t ranks, const uint32_t *words, int64_t word_stride, const float *above,
               const float *below, int64_t mean_stride, const float *weights, int threads);

#endif
