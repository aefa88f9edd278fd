/* Copying rows of bytes and hashing them in one pass, past the cache.
 *
 * A copy by ordinary stores reads every line of the target before it writes it; streaming stores do
 * not, which saves a third of the traffic of memory. What is hashed is the source, four kilobytes at
 * a time, while the first-level cache holds it. The hash is XXH3 of 64 bits, seed 0, for inputs of
 * more than 240 bytes (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
 *
 * The same for rows that come out of another process or over a stream socket: they land in a little
 * memory that stays in the second-level cache, and are hashed and moved on from there.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__linux__)
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target("avx2")))
#endif

enum { STRIPE = 64, STRIPES_PER_BLOCK = 16, CHUNK = 1024, FAR = 6144, SHORTEST_STREAM = 256,
       MOST_RUNS = 1024, SCRATCH = 128 << 10, ENDED = -1 };

static const uint32_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87U, P64_2 = 0xC2B2AE3D27D4EB4FU,
                      P64_3 = 0x165667B19E3779F9U, P64_4 = 0x85EBCA77C2B2AE63U,
                      P64_5 = 0x27D4EB2F165667C5U;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* A hash under way. A stripe is taken in once a byte follows it: the last one is hashed otherwise.
 * `pending` bytes wait in `buffer`, and `last` is the stripe before these. */
struct running {
    uint64_t lanes[8];
    uint64_t total;
    uint32_t stripe;
    uint32_t pending;
    uint8_t buffer[STRIPE];
    uint8_t last[STRIPE];
};

static uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void take_plain(uint64_t *lanes, const uint8_t *data, const uint8_t *secret, size_t count) {
    for (; count; count--, data += STRIPE, secret += 8)
        for (int i = 0; i < 8; i++) {
            uint64_t value = word(data + 8 * i), mixed = value ^ word(secret + 8 * i);
            lanes[i ^ 1] += value;
            lanes[i] += (uint64_t)(uint32_t)mixed * (mixed >> 32);
        }
}

#if defined(__x86_64__)
WITH_AVX2 static __m256i mixed_in(__m256i lanes, const uint8_t *data, const uint8_t *secret) {
    __m256i value = _mm256_loadu_si256((const __m256i *)data);
    __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

WITH_AVX2 static void take_avx2(uint64_t *lanes, const uint8_t *data, const uint8_t *secret,
                                size_t count) {
    __m256i low = _mm256_loadu_si256((const __m256i *)lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(lanes + 4));
    for (; count; count--, data += STRIPE, secret += 8) {
        low = mixed_in(low, data, secret);
        high = mixed_in(high, data + 32, secret + 32);
    }
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
}

WITH_AVX2 static void stream_avx2(uint8_t *to, const uint8_t *from, size_t size) {
    size_t head = -(uintptr_t)to & (STRIPE - 1);
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= 64; to += 64, from += 64, size -= 64) {
        __m256i low = _mm256_loadu_si256((const __m256i *)from);
        __m256i high = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm256_stream_si256((__m256i *)to, low);
        _mm256_stream_si256((__m256i *)(to + 32), high);
    }
    memcpy(to, from, size);
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
#endif

static void take(uint64_t *lanes, const uint8_t *data, const uint8_t *secret, size_t count) {
#if defined(__x86_64__)
    if (has_avx2()) {
        take_avx2(lanes, data, secret, count);
        return;
    }
#endif
    take_plain(lanes, data, secret, count);
}

static void stream(uint8_t *to, const uint8_t *from, size_t size) {
#if defined(__x86_64__)
    if (size >= SHORTEST_STREAM && has_avx2()) {
        stream_avx2(to, from, size);
        return;
    }
#endif
    memcpy(to, from, size);
}

static void take_stripes(struct running *hash, const uint8_t *data, size_t count) {
    while (count) {
        size_t some = STRIPES_PER_BLOCK - hash->stripe;
        some = some < count ? some : count;
        take(hash->lanes, data, SECRET + 8 * hash->stripe, some);
        hash->stripe += some, data += some * STRIPE, count -= some;
        if (hash->stripe == STRIPES_PER_BLOCK) {
            for (int i = 0; i < 8; i++) {
                uint64_t lane = hash->lanes[i];
                hash->lanes[i] = (lane ^ lane >> 47 ^ word(SECRET + 128 + 8 * i)) * P32_1;
            }
            hash->stripe = 0;
        }
    }
}

static void add(struct running *hash, const uint8_t *data, size_t size) {
    hash->total += size;
    if (hash->pending + size <= STRIPE) {
        memcpy(hash->buffer + hash->pending, data, size);
        hash->pending += size;
        return;
    }
    if (hash->pending) {
        size_t some = STRIPE - hash->pending;
        memcpy(hash->buffer + hash->pending, data, some);
        data += some, size -= some;
        take_stripes(hash, hash->buffer, 1);
        memcpy(hash->last, hash->buffer, STRIPE);
    }
    size_t count = (size - 1) / STRIPE;
    if (count) {
        take_stripes(hash, data, count);
        data += count * STRIPE, size -= count * STRIPE;
        memcpy(hash->last, data - STRIPE, STRIPE);
    }
    memcpy(hash->buffer, data, size);
    hash->pending = size;
}

/* Carry a hash on over bytes that lie in the cache. */
void cosmos_add(struct running *hash, const uint8_t *data, size_t size) { add(hash, data, size); }

size_t cosmos_state_bytes(void) { return sizeof(struct running); }

void cosmos_start(struct running *hash) {
    uint64_t lanes[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memset(hash, 0, sizeof *hash);
    memcpy(hash->lanes, lanes, sizeof lanes);
}

/* The hash so far, of more than 240 bytes; more can be added afterwards. */
uint64_t cosmos_value(const struct running *hash) {
    uint64_t lanes[8], value = hash->total * P64_1;
    uint8_t end[STRIPE];
    memcpy(lanes, hash->lanes, sizeof lanes);
    memcpy(end, hash->last + hash->pending, STRIPE - hash->pending);
    memcpy(end + STRIPE - hash->pending, hash->buffer, hash->pending);
    take(lanes, end, SECRET + 121, 1);
    for (int i = 0; i < 4; i++) {
        unsigned __int128 product = (unsigned __int128)(lanes[2 * i] ^ word(SECRET + 11 + 16 * i)) *
                                    (lanes[2 * i + 1] ^ word(SECRET + 19 + 16 * i));
        value += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    value = (value ^ value >> 37) * 0x165667919E3779F9U;
    return value ^ value >> 32;
}

/* Copy rows, add them to a hash, or both: `hash` or `to` may be null. */
static void move_rows(struct running *hash, uint8_t *to, ptrdiff_t to_step, const uint8_t *from,
                      ptrdiff_t from_step, size_t row_bytes, size_t num_rows) {
    for (size_t row = 0; row < num_rows; row++, from += from_step) {
        for (size_t done = 0, size; done < row_bytes; done += size) {
            /* Chunks end with a line of the target: one written both ways costs ten times more. */
            size = CHUNK - (to ? (uintptr_t)(to + done) % STRIPE : 0);
            size = row_bytes - done < size ? row_bytes - done : size;
            size_t rows_ahead = (done + FAR) / row_bytes, inside = (done + FAR) % row_bytes;
            if (row + rows_ahead < num_rows)
                for (size_t at = 0; at < size; at += STRIPE)
                    __builtin_prefetch(from + rows_ahead * from_step + inside + at);
            if (hash) add(hash, from + done, size);
            if (to) stream(to + done, from + done, size);
        }
        if (to) to += to_step;
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Read rows from another process into one contiguous place, by way of the second-level cache;
 * `hash` may be null. Returns 0, or the `errno` of what went wrong. */
static int read_rows(struct running *hash, uint8_t *to, int process, uint64_t from,
                     ptrdiff_t from_step, size_t row_bytes, size_t num_rows) {
#if defined(__linux__)
    uint8_t scratch[SCRATCH];
    size_t row = 0, inside = 0;
    while (row < num_rows) {
        struct iovec runs[MOST_RUNS], here = {scratch, 0};
        size_t count = 0;
        while (row < num_rows && count < MOST_RUNS && here.iov_len < SCRATCH) {
            size_t size = row_bytes - inside, room = SCRATCH - here.iov_len;
            size = size < room ? size : room;
            runs[count].iov_base = (void *)(uintptr_t)(from + row * from_step + inside);
            runs[count++].iov_len = size;
            here.iov_len += size;
            inside += size;
            if (inside == row_bytes) row++, inside = 0;
        }
        ssize_t found = process_vm_readv(process, &here, 1, runs, count, 0);
        if (found < 0) return errno;
        if ((size_t)found != here.iov_len) return EFAULT;
        move_rows(hash, to, 0, scratch, 0, found, 1);
        to += found;
    }
    return 0;
#else
    return ENOSYS;
#endif
}

/* Rows to be copied, hashed or both: `to` may be null, and `value` is set where `is_hashed`. */
struct move {
    uint8_t *to;
    ptrdiff_t to_step;
    uint64_t from;
    ptrdiff_t from_step;
    size_t row_bytes;
    size_t num_rows;
    uint64_t is_hashed;
    uint64_t value;
};

/* Make moves in order: inside this process (`process` 0), or out of another one, where `to` is
 * contiguous. Returns 0, or the `errno` of the first that went wrong. */
int cosmos_make(struct move *moves, size_t count, int process) {
    for (struct move *each = moves; each < moves + count; each++) {
        struct running state, *hash = each->is_hashed ? &state : NULL;
        int failure = 0;
        if (hash) cosmos_start(hash);
        if (process)
            failure = read_rows(hash, each->to, process, each->from, each->from_step,
                                each->row_bytes, each->num_rows);
        else
            move_rows(hash, each->to, each->to_step, (const uint8_t *)(uintptr_t)each->from,
                      each->from_step, each->row_bytes, each->num_rows);
        if (failure) return failure;
        if (hash) each->value = cosmos_value(hash);
    }
    return 0;
}

#if defined(__linux__)
static int is_past(double moment) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec > moment;
}
#endif

/* Fill one contiguous place from a stream socket, by way of the second-level cache; `hash` may be
 * null. One wait lasts as long as the socket's own limit says, all of them until the moment `until`
 * of the monotonic clock. Returns 0, `ENDED` where the stream does, or an `errno`. */
int cosmos_receive(struct running *hash, uint8_t *to, size_t size, int stream, double until) {
#if defined(__linux__)
    _Alignas(STRIPE) uint8_t scratch[SCRATCH];
    for (size_t done = 0; done < size;) {
        /* What is moved at a time ends with a line of the target, as in `move_rows`. */
        size_t room = SCRATCH - (uintptr_t)(to + done) % STRIPE;
        room = size - done < room ? size - done : room;
        ssize_t found = recv(stream, scratch, room, MSG_WAITALL);
        if (found == 0) return ENDED;
        if (found < 0 && errno != EINTR) return errno;
        if (found > 0) {
            move_rows(hash, to + done, 0, scratch, 0, found, 1);
            done += found;
        }
        if (done < size && is_past(until)) return EAGAIN;
    }
    return 0;
#else
    return ENOSYS;
#endif
}

/* Send rows over a stream socket, straight from where they lie; limits and result as above. */
int cosmos_send(const uint8_t *from, ptrdiff_t step, size_t row_bytes, size_t num_rows, int stream,
                double until) {
#if defined(__linux__)
    size_t row = 0, inside = 0;
    while (row < num_rows) {
        struct iovec runs[MOST_RUNS];
        size_t count = 0;
        for (size_t next = row; next < num_rows && count < MOST_RUNS; next++, count++) {
            size_t skipped = next == row ? inside : 0;
            runs[count].iov_base = (void *)(from + (ptrdiff_t)next * step + skipped);
            runs[count].iov_len = row_bytes - skipped;
        }
        struct msghdr message = {.msg_iov = runs, .msg_iovlen = count};
        ssize_t sent = sendmsg(stream, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR) return errno;
        if (sent > 0) inside += sent, row += inside / row_bytes, inside %= row_bytes;
        if (row < num_rows && is_past(until)) return EAGAIN;
    }
    return 0;
#else
    return ENOSYS;
#endif
}
