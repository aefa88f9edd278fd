/* Copying rows of bytes and hashing them in one pass, past the cache.
 *
 * A copy by ordinary stores reads every line of the target before it writes it; streaming stores do
 * not, which saves a third of the traffic of memory. Where the hash's stripes are lines of the target
 * a stripe is loaded once, stored and hashed, so that the hash is worked out while memory is waited
 * for; elsewhere four kilobytes are hashed and then copied out of the first-level cache. The hash is
 * XXH3 of 64 bits, seed 0, for inputs of more than 240 bytes
 * (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
 *
 * The same for rows that come out of another process or over a stream socket: they land in a little
 * memory that stays in the second-level cache, and are hashed and moved on from there.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
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

enum { STRIPE = 64, STRIPES_PER_BLOCK = 16, CHUNK = 4096, FAR = 6144, SHORTEST_STREAM = 256,
       MOST_RUNS = 1024, SCRATCH = 128 << 10, FAR_SCRATCH = 1 << 20, MOST_GAP = 8192,
       ENDED = -1 };

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
WITH_AVX2 static __m256i mixed_in(__m256i lanes, __m256i value, const uint8_t *secret) {
    __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

WITH_AVX2 static __m256i scrambled(__m256i lanes, const uint8_t *secret) {
    __m256i prime = _mm256_set1_epi32((int)P32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)secret));
    __m256i low = _mm256_mul_epu32(lanes, prime);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

/* Hash stripes, and store them where `to` is a line of the target: a stripe is read once. */
WITH_AVX2 static void take_avx2(struct running *hash, uint8_t *to, const uint8_t *data,
                                size_t count, ptrdiff_t ahead) {
    __m256i low = _mm256_loadu_si256((const __m256i *)hash->lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(hash->lanes + 4));
    size_t stripe = hash->stripe;
    for (; count; count--, data += STRIPE) {
        __m256i first = _mm256_loadu_si256((const __m256i *)data);
        __m256i second = _mm256_loadu_si256((const __m256i *)(data + 32));
        __builtin_prefetch(data + ahead);
        if (to) {
            _mm256_stream_si256((__m256i *)to, first);
            _mm256_stream_si256((__m256i *)(to + 32), second);
            to += STRIPE;
        }
        low = mixed_in(low, first, SECRET + 8 * stripe);
        high = mixed_in(high, second, SECRET + 8 * stripe + 32);
        if (++stripe == STRIPES_PER_BLOCK) {
            low = scrambled(low, SECRET + 128), high = scrambled(high, SECRET + 160);
            stripe = 0;
        }
    }
    _mm256_storeu_si256((__m256i *)hash->lanes, low);
    _mm256_storeu_si256((__m256i *)(hash->lanes + 4), high);
    hash->stripe = stripe;
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

static void stream(uint8_t *to, const uint8_t *from, size_t size) {
#if defined(__x86_64__)
    int is_line = size == STRIPE && (uintptr_t)to % STRIPE == 0;
    if ((size >= SHORTEST_STREAM || is_line) && has_avx2()) {
        stream_avx2(to, from, size);
        return;
    }
#endif
    memcpy(to, from, size);
}

/* Whether stripes that start `head` bytes from here are lines of the target as well. */
static int are_lines(const uint8_t *to, size_t head) {
#if defined(__x86_64__)
    return has_avx2() && ((uintptr_t)to + head) % STRIPE == 0;
#else
    return 0;
#endif
}

/* Hash stripes; with `to`, which only `are_lines` allows, store them as well. */
static void take_stripes(struct running *hash, uint8_t *to, const uint8_t *data, size_t count,
                         ptrdiff_t ahead) {
#if defined(__x86_64__)
    if (has_avx2()) {
        take_avx2(hash, to, data, count, ahead);
        return;
    }
#endif
    while (count) {
        size_t some = STRIPES_PER_BLOCK - hash->stripe;
        some = some < count ? some : count;
        take_plain(hash->lanes, data, SECRET + 8 * hash->stripe, some);
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

/* Hash bytes, and copy them where `to` is not null; what lies `ahead` of them comes next. */
static void add(struct running *hash, uint8_t *to, const uint8_t *data, size_t size,
                ptrdiff_t ahead) {
    size_t head = hash->pending ? STRIPE - hash->pending : 0;
    hash->total += size;
    if (hash->pending + size <= STRIPE) {
        memcpy(hash->buffer + hash->pending, data, size);
        hash->pending += size;
        if (to) memcpy(to, data, size);
        return;
    }
    uint8_t *lines = to && are_lines(to, head) ? to : NULL, *copy = lines ? NULL : to;
    const uint8_t *start = data;
    size_t whole = size;
    if (hash->pending) {
        memcpy(hash->buffer + hash->pending, data, head);
        if (lines) memcpy(lines, data, head), lines += head;
        data += head, size -= head;
        take_stripes(hash, NULL, hash->buffer, 1, 0);
        memcpy(hash->last, hash->buffer, STRIPE);
    }
    size_t count = (size - 1) / STRIPE;
    if (count) {
        take_stripes(hash, lines, data, count, ahead);
        data += count * STRIPE, size -= count * STRIPE;
        if (lines) lines += count * STRIPE;
        memcpy(hash->last, data - STRIPE, STRIPE);
    }
    memcpy(hash->buffer, data, size);
    hash->pending = size;
    if (lines) stream(lines, data, size);
    if (copy) stream(copy, start, whole);
}

/* Carry a hash on over bytes. */
void cosmos_add(struct running *hash, const uint8_t *data, size_t size) {
    add(hash, NULL, data, size, size > FAR ? FAR : 0);
}

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
    take_plain(lanes, end, SECRET + 121, 1);
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
            ptrdiff_t ahead = 0;
            if (row + rows_ahead < num_rows)
                ahead = (ptrdiff_t)rows_ahead * from_step + (ptrdiff_t)inside - (ptrdiff_t)done;
            if (hash)
                add(hash, to ? to + done : NULL, from + done, size, ahead);
            else if (to)
                stream(to + done, from + done, size);
        }
        if (to) to += to_step;
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

#if defined(__linux__)
/* As `process_vm_readv`, of `size` bytes in all. Returns 0 or an `errno`. */
static int read_runs(uint8_t *scratch, size_t size, int process, const struct iovec *runs,
                     size_t count) {
    struct iovec here = {scratch, size};
    ssize_t found = process_vm_readv(process, &here, 1, runs, count, 0);
    return found < 0 ? errno : (size_t)found == size ? 0 : EFAULT;
}
#endif

/* Read rows from another process into one contiguous place, by way of `scratch`: more of it costs
 * fewer calls, which cost more than a third-level cache. A row by itself costs the kernel as much as
 * some kilobytes, so that narrow gaps are read as well. `hash` may be null. Returns 0, or the
 * `errno` of what went wrong. */
static int read_rows(struct running *hash, uint8_t *scratch, uint8_t *to, int process, uint64_t from,
                     ptrdiff_t from_step, size_t row_bytes, size_t num_rows) {
#if defined(__linux__)
    int failure = 0;
    ptrdiff_t gap = from_step - (ptrdiff_t)row_bytes;
    if (0 < gap && gap <= MOST_GAP && from_step <= FAR_SCRATCH / 2) {
        size_t most = FAR_SCRATCH / from_step;
        for (size_t row = 0, some; row < num_rows; row += some) {
            some = num_rows - row < most ? num_rows - row : most;
            struct iovec run = {(void *)(uintptr_t)(from + row * from_step),
                                some * from_step - gap};
            failure = read_runs(scratch, run.iov_len, process, &run, 1);
            if (failure) return failure;
            move_rows(hash, to, row_bytes, scratch, from_step, row_bytes, some);
            to += some * row_bytes;
        }
        return 0;
    }
    size_t row = 0, inside = 0;
    while (row < num_rows) {
        struct iovec runs[MOST_RUNS];
        size_t count = 0, filled = 0;
        while (row < num_rows && count < MOST_RUNS && filled < FAR_SCRATCH) {
            size_t size = row_bytes - inside, room = FAR_SCRATCH - filled;
            size = size < room ? size : room;
            runs[count].iov_base = (void *)(uintptr_t)(from + row * from_step + inside);
            runs[count++].iov_len = size;
            filled += size;
            inside += size;
            if (inside == row_bytes) row++, inside = 0;
        }
        failure = read_runs(scratch, filled, process, runs, count);
        if (failure) return failure;
        move_rows(hash, to, 0, scratch, 0, filled, 1);
        to += filled;
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

/* From the first to the last byte of a move's rows; more than fits where gaps are too wide. */
static size_t span_of(const struct move *each) {
    ptrdiff_t gap = each->from_step - (ptrdiff_t)each->row_bytes;
    if (!each->num_rows || (each->num_rows > 1 && (gap < 0 || gap > MOST_GAP)))
        return FAR_SCRATCH + 1;
    return (each->num_rows - 1) * each->from_step + each->row_bytes;
}

/* How many of the next moves come out of one stretch that fits into `FAR_SCRATCH`, with narrow gaps
 * between them; `size` is how long that is. */
static size_t count_together(const struct move *moves, size_t count, size_t *size) {
    size_t found = 0;
    for (*size = 0; found < count; found++) {
        uint64_t start = moves[found].from - moves->from;
        size_t span = span_of(moves + found);
        if (start < *size || start - *size > MOST_GAP || start + span > FAR_SCRATCH) break;
        *size = start + span;
    }
    return found;
}

/* Fill `scratch` with what several moves want. Whether that went well: something else than these
 * moves may lie between them, or nothing. */
static int read_together(uint8_t *scratch, size_t size, int process, uint64_t from) {
#if defined(__linux__)
    struct iovec run = {(void *)(uintptr_t)from, size};
    return read_runs(scratch, size, process, &run, 1) == 0;
#else
    return 0;
#endif
}

/* Make moves in order: inside this process (`process` 0), or out of another one, where `to` is
 * contiguous. There a call costs as much as 50 to 150 kilobytes, so that moves that lie close
 * together have one for all. Returns 0, or the `errno` of the first that went wrong. */
int cosmos_make(struct move *moves, size_t count, int process) {
    uint8_t *scratch = process ? malloc(FAR_SCRATCH) : NULL;
    int failure = process && !scratch ? ENOMEM : 0;
    size_t num_read = 0, size;
    uint64_t start = 0;
    for (struct move *each = moves; each < moves + count && !failure; each++) {
        struct running state, *hash = each->is_hashed ? &state : NULL;
        if (hash) cosmos_start(hash);
        if (process && !num_read) {
            num_read = count_together(each, moves + count - each, &size);
            start = each->from;
            if (num_read < 2 || !read_together(scratch, size, process, start)) num_read = 0;
        }
        if (num_read)
            move_rows(hash, each->to, each->row_bytes, scratch + (each->from - start),
                      each->from_step, each->row_bytes, each->num_rows), num_read--;
        else if (process)
            failure = read_rows(hash, scratch, each->to, process, each->from, each->from_step,
                                each->row_bytes, each->num_rows);
        else
            move_rows(hash, each->to, each->to_step, (const uint8_t *)(uintptr_t)each->from,
                      each->from_step, each->row_bytes, each->num_rows);
        if (hash && !failure) each->value = cosmos_value(hash);
    }
    free(scratch);
    return failure;
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

/* The same for moves, one after another, each of which fills one contiguous place. */
int cosmos_receive_all(struct move *moves, size_t count, int stream, double until) {
    for (struct move *each = moves; each < moves + count; each++) {
        struct running state;
        cosmos_start(&state);
        int result = cosmos_receive(&state, each->to, each->row_bytes, stream, until);
        if (result) return result;
        each->value = cosmos_value(&state);
    }
    return 0;
}

/* Send the rows of moves over a stream socket, straight from where they lie, as many in a call as it
 * takes; limits and result as above. */
int cosmos_send_all(const struct move *moves, size_t count, int stream, double until) {
#if defined(__linux__)
    const struct move *each = moves, *end = moves + count;
    size_t row = 0, inside = 0;
    while (each < end) {
        struct iovec runs[MOST_RUNS];
        size_t filled = 0;
        const struct move *at = each;
        for (size_t next = row, skipped = inside; at < end && filled < MOST_RUNS; skipped = 0) {
            runs[filled].iov_base = (void *)(uintptr_t)(at->from + next * at->from_step + skipped);
            runs[filled++].iov_len = at->row_bytes - skipped;
            if (++next == at->num_rows) at++, next = 0;
        }
        struct msghdr message = {.msg_iov = runs, .msg_iovlen = filled};
        ssize_t sent = sendmsg(stream, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR) return errno;
        if (sent > 0) inside += sent;
        while (each < end && inside >= each->row_bytes) {
            inside -= each->row_bytes;
            if (++row == each->num_rows) each++, row = 0;
        }
        if (each < end && is_past(until)) return EAGAIN;
    }
    return 0;
#else
    return ENOSYS;
#endif
}
