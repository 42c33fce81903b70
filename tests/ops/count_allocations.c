/* Preloaded: counts what a thread allocates during a call. */
#include <stddef.h>
#include <stdint.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static __thread int64_t allocations, bytes;

static void note(size_t size) {
    ++allocations;
    bytes += (int64_t)size;
}

void* malloc(size_t size) {
    note(size);
    return __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
    note(count * size);
    return __libc_calloc(count, size);
}

void* realloc(void* place, size_t size) {
    note(size);
    return __libc_realloc(place, size);
}

void* memalign(size_t alignment, size_t size) {
    note(size);
    return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
    note(size);
    return __libc_memalign(alignment, size);
}

int posix_memalign(void** place, size_t alignment, size_t size) {
    note(size);
    *place = __libc_memalign(alignment, size);
    return *place == NULL ? 12 : 0;
}

/* Calls a function of up to six words; counts[2]: its allocations, and their bytes. */
int32_t counted(int32_t (*call)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t), const uint64_t* words,
                int64_t* counts) {
    const int64_t allocations_before = allocations, bytes_before = bytes;
    const int32_t code = call(words[0], words[1], words[2], words[3], words[4], words[5]);
    counts[0] = allocations - allocations_before;
    counts[1] = bytes - bytes_before;
    return code;
}
