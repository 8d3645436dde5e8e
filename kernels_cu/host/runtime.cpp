// A GPU's grid on one CPU thread: the threads of a block are fibers, run one at a time until each waits or returns;
// blocks run one after another. A seed shuffles the order of both.
//
// With `checked` set every access of the kernel is looked at. The kernel is compiled with -fsanitize=thread and linked
// without that sanitizer's library, so its code calls __tsan_read4(address) and so on before each access: the functions
// of those names are here. Each byte of an array or of shared memory has a state (is it an element's, initialised,
// written) and the last write and read, of which thread and when. Two accesses by threads of a block are in order when
// one of its barriers lies between, or for threads of one warp, one of all its lanes. Those of two blocks are only by
// way of atomics: what a block did before a thread's __threadfence() and a later atomic in global memory comes before
// what another does after an atomic of its own. A second access to a byte, unordered with the first, is a race if one
// of them writes and not both are atomic.
//
// Not seen: a pointer that leaves one array of shared memory for the next; a misaligned access that the compiler made
// several of.
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <new>
#include <vector>

typedef unsigned long long Lanes;
typedef void (*Combine)(void **arrived, Lanes lanes);
typedef uintptr_t Address;

enum Finding { NONE, OUTSIDE, MISALIGNED, UNINITIALISED, RACE, BARRIER, LANES, ABSENT_LANE, ARRAY_INDEX };
enum State : uint8_t { PART = 1, INITIALISED = 2, WRITTEN = 4 };
enum Kind { READ = 1, WRITE = 2, ATOMIC = READ | WRITE | 4 };

extern "C" {
// The last access to a byte. Where several are not in order with one another (reads, or atomics) `who` says whose they
// are: of one thread, of threads of one warp, of one block, or of several blocks.
enum Who : char { NOBODY, THREAD, WARP, BLOCK, GRID };
struct Access {
    unsigned block, epoch, warp_epoch, code;
    short thread;
    bool atomic;
    Who who;
};
struct Cell {
    Access write, read;
};

// An array of the caller's, or shared memory, with what is known of each byte.
struct Memory {
    Address begin, end;
    uint8_t *states;
    Cell *cells;
    long long number;
};

struct dim3 {
    unsigned x, y, z;
};
dim3 threadIdx, blockIdx, blockDim, gridDim;
// The linker's names for the start of the library, and for the kernel's static shared memory if it has any.
extern const char __ehdr_start[];
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

// What went wrong: the access, and the earlier one it is in conflict with.
enum { STATIC_SHARED = -1, DYNAMIC_SHARED = -2, NOWHERE = -3 };
struct Report {
    int finding, region;  // the number of the caller's array, or one of the three above
    int size, writes, other_writes;
    dim3 block, thread, other_block, other_thread;
    long long offset;          // in bytes, from the region's beginning
    Address code, other_code;  // from the start of the library
    Lanes lanes, arrived;
};
}

namespace {
struct Fiber {
    jmp_buf registers;
    enum { READY, AT_BARRIER, AT_COLLECTIVE, DONE } state;
    bool started, fenced;
    int place;     // where it waits: the line
    Address code;  // and the address
};
struct Warp {
    unsigned epoch;
    Lanes waiting;
    struct {
        Lanes lanes;
        Combine combine;
        void *pointer;
    } lane[64];
};
// In the life of a block: one of a thread, after all that came before the last barrier, before all after the next one.
struct Moment {
    unsigned epoch;
    int thread;
};

const unsigned MOST_THREADS = 1024;
const size_t STACK = 1 << 20, GUARD = 1 << 16;  // a GPU's thread has 512 KiB of local memory at most

char *stacks;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Memory> memories;
std::vector<Moment> published;  // of each block: its last fence with an atomic after it
Moment joined;                  // of this block: its first atomic
std::vector<char> dynamic;
ucontext_t start;
jmp_buf scheduler;
int current, warp_size;
unsigned block_number, epoch;
uint64_t random_state;
bool checked;
Report *report;
void (*kernel)(void **);
void **arguments;

#define CALLER ((Address)__builtin_return_address(0) - (Address)__ehdr_start)

// Memory of zeros that takes no room until it is touched.
char *reserve(size_t bytes) {
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return (char *)p;
}

// 0 … n - 1 in any order.
std::vector<unsigned> shuffled(unsigned n) {
    std::vector<unsigned> order(n);
    for (unsigned i = 0; i < n; i++) {
        random_state = random_state * 6364136223846793005 + 1442695040888963407;  // the generator of Knuth's MMIX
        unsigned j = (random_state >> 33) % (i + 1);
        order[i] = order[j], order[j] = i;
    }
    return order;
}

dim3 index_of(unsigned number, dim3 of) { return {number % of.x, number / of.x % of.y, number / of.x / of.y}; }

[[noreturn]] void stop(Finding finding, unsigned thread, Address code) {
    report->finding = finding;
    report->block = blockIdx;
    report->thread = index_of(thread, blockDim);
    report->code = code;
    _longjmp(scheduler, 2);
}

// ---- fibers

void yield() {
    if (!_setjmp(fibers[current].registers)) _longjmp(scheduler, 1);
}

void run() {
    for (;;) {
        kernel(arguments);
        fibers[current].state = Fiber::DONE;
        yield();
    }
}

// Runs fiber i until it waits or returns; gives 2 if it stopped at a finding.
int resume(unsigned i) {
    int how = _setjmp(scheduler);
    if (how) return how;
    current = (int)i;
    threadIdx = index_of(i, blockDim);
    if (fibers[i].started) _longjmp(fibers[i].registers, 1);
    fibers[i].started = true;
    start.uc_stack.ss_sp = stacks + i * STACK + GUARD;
    start.uc_stack.ss_size = STACK - GUARD;
    makecontext(&start, run, 0);
    setcontext(&start);
    return 2;
}

bool meets(const Fiber &a, const Fiber &b) { return a.state == b.state && a.place == b.place; }

// Whether a lane waits in the same shuffle, vote or barrier of the warp as the thread `waits`.
bool meets(unsigned waits, int lane) {
    unsigned mine = waits % warp_size;
    Warp &warp = warps[waits / warp_size];
    auto &a = warp.lane[mine], &b = warp.lane[lane];
    return warp.waiting >> lane & 1 && a.lanes == b.lanes && a.combine == b.combine &&
           fibers[waits].place == fibers[waits - mine + lane].place;
}

// Nothing moves: some thread waits for another that cannot come.
[[noreturn]] void stuck() {
    unsigned i = 0, j = 0;
    while (fibers[i].state == Fiber::DONE) i++;
    if (fibers[i].state == Fiber::AT_COLLECTIVE) {
        report->lanes = warps[i / warp_size].lane[i % warp_size].lanes;
        for (int lane = 0; lane < warp_size; lane++) report->arrived |= (Lanes)meets(i, lane) << lane;
        stop(LANES, i, fibers[i].code);
    }
    while (meets(fibers[i], fibers[j])) j++;
    report->other_thread = index_of(j, blockDim);
    report->other_code = fibers[j].state == Fiber::DONE ? 0 : fibers[j].code;
    stop(BARRIER, i, fibers[i].code);
}

// Gives false if a thread stopped at a finding.
bool run_block() {
    std::vector<unsigned> order = shuffled((unsigned)fibers.size());
    for (auto &m : memories)
        if (m.number < 0) {
            memset((void *)m.begin, 0xff, m.end - m.begin);  // NaN in every floating type
            memset(m.states, PART, m.end - m.begin);
        }
    epoch = 0;
    joined = {~0u, -1};
    for (auto &w : warps) w.epoch = 0, w.waiting = 0;
    for (auto &f : fibers) f.state = Fiber::READY, f.fenced = false;
    for (;;) {
        bool ran = false;
        for (unsigned i : order) {
            if (fibers[i].state != Fiber::READY) continue;
            if (resume(i) == 2) return false;
            ran = true;
        }
        if (ran) continue;
        if (_setjmp(scheduler)) return false;
        for (auto &f : fibers)
            if (f.state == Fiber::AT_COLLECTIVE || !meets(f, fibers[0])) stuck();
        if (fibers[0].state == Fiber::DONE) return true;
        epoch++;
        for (auto &f : fibers) f.state = Fiber::READY;
    }
}

void arrive(Lanes lanes, Combine combine, void *mine, int place, Address code) {
    int lane = current % warp_size;
    Warp &warp = warps[current / warp_size];
    fibers[current].place = place, fibers[current].code = code;
    if (!(lanes >> lane & 1)) stop(LANES, (unsigned)current, code);
    warp.lane[lane] = {lanes, combine, mine};
    warp.waiting |= 1ull << lane;
    bool all = (warp.waiting & lanes) == lanes;
    for (int i = 0; i < warp_size && all; i++) all = !(lanes >> i & 1) || meets((unsigned)current, i);
    if (!all) {
        fibers[current].state = Fiber::AT_COLLECTIVE;
        return yield();
    }
    if (combine) {
        void *arrived[64];
        for (int i = 0; i < warp_size; i++) arrived[i] = warp.lane[i].pointer;
        bool before = checked;
        checked = false;  // it works on the stacks of all lanes
        combine(arrived, lanes);
        checked = before;
    } else if (!(~lanes << (64 - warp_size))) {
        warp.epoch++;
    }
    warp.waiting &= ~lanes;
    for (int i = 0; i < warp_size; i++)
        if ((lanes >> i & 1) && i != lane) fibers[current - lane + i].state = Fiber::READY;
}

// ---- accesses

bool same_warp(const Access &a) { return a.thread / warp_size == current / warp_size; }

bool in_order(Moment a, Moment b) { return a.epoch < b.epoch || (a.epoch == b.epoch && a.thread == b.thread); }

// Whether the earlier access a is not in order with one that the current thread makes now.
bool unordered(const Access &a, bool shared) {
    if (a.who == NOBODY) return false;
    if (a.block != block_number) {
        if (shared) return false;  // it starts anew with each block
        return a.who != THREAD || !in_order({a.epoch, a.thread}, published[a.block]) ||
               !in_order(joined, {epoch, current});
    }
    if (a.who == GRID) return true;
    if (a.epoch != epoch || (a.who == THREAD && a.thread == current)) return false;
    return a.who == BLOCK || !same_warp(a) || a.warp_epoch == warps[current / warp_size].epoch;
}

// `a` becomes the access that the current thread makes now, together with those it is not in order with.
void note(Access &a, bool alone, bool atomic, Address code) {
    Who who = alone                                      ? THREAD
              : a.block != block_number || a.who == GRID ? GRID
              : a.who == BLOCK || !same_warp(a)          ? BLOCK
                                                         : WARP;
    a = {block_number, epoch, warps[current / warp_size].epoch, (unsigned)code, (short)current, atomic, who};
}

[[noreturn]] void wrong(Finding finding, Address address, size_t size, int kind, Address code) {
    report->region = NOWHERE;
    report->size = (int)size;
    report->writes = kind & WRITE;
    Address nearest = 1 << 20;
    for (auto &m : memories) {
        Address distance = address < m.begin ? m.begin - address : address < m.end ? 0 : address - m.end + 1;
        if (m.begin == m.end || distance >= nearest) continue;
        nearest = distance;
        report->region = (int)m.number;
        report->offset = (long long)(address - m.begin);
    }
    stop(finding, (unsigned)current, code);
}

void access(Address address, size_t size, int kind, size_t alignment, Address code) {
    if (!checked || address - (Address)(stacks + current * STACK) < STACK) return;
    const Memory *m = nullptr;
    for (auto &candidate : memories)
        if (address >= candidate.begin && address + size <= candidate.end) {
            m = &candidate;
            break;
        }
    if (!m) {
        for (const dim3 *index : {&threadIdx, &blockIdx, &blockDim, &gridDim})  // clang does not spare these
            if (address - (Address)index < sizeof(dim3)) return;
        wrong(OUTSIDE, address, size, kind, code);
    }
    if (address % alignment) wrong(MISALIGNED, address, size, kind, code);
    bool shared = m->number < 0, atomic = kind == ATOMIC, writes = kind & WRITE;
    uint8_t *state = m->states + (address - m->begin);
    Cell *cell = m->cells + (address - m->begin);
    for (Cell *end = cell + size; cell < end; cell++, state++) {
        if (!(*state & PART)) wrong(OUTSIDE, address, size, kind, code);
        if (kind & READ && !(*state & INITIALISED)) wrong(UNINITIALISED, address, size, kind, code);
        if (writes) *state |= INITIALISED | WRITTEN;
        bool after_write = !unordered(cell->write, shared), after_read = !unordered(cell->read, shared);
        const Access *other = nullptr;
        if (writes && !after_read) other = &cell->read;
        if (!after_write && !(cell->write.atomic && atomic)) other = &cell->write;
        if (other) {
            report->other_block = index_of(other->block, gridDim);
            report->other_thread = index_of(other->thread, blockDim);
            report->other_code = other->code;
            report->other_writes = other == &cell->write;
            wrong(RACE, address, size, kind, code);
        }
        if (writes) note(cell->write, after_write, atomic, code);
        else note(cell->read, after_read, false, code);
    }
    if (atomic && !shared) {
        if (joined.epoch == ~0u) joined = {epoch, current};
        if (fibers[current].fenced) published[block_number] = {epoch, current};
    }
}
}  // namespace

namespace host {
int lane() { return current % warp_size; }

void *dynamic_shared() { return (void *)(((Address)dynamic.data() + 127) & ~(Address)127); }

void sync_block(int place) {
    fibers[current].state = Fiber::AT_BARRIER;
    fibers[current].place = place, fibers[current].code = CALLER;
    yield();
}

void collective(Lanes lanes, Combine combine, void *mine, int place) { arrive(lanes, combine, mine, place, CALLER); }

void sync_warp(Lanes lanes, int place) { arrive(lanes, nullptr, nullptr, place, CALLER); }

void fence() { fibers[current].fenced = true; }

void atomic_access(void *address, int size) { access((Address)address, size, ATOMIC, size, CALLER); }

[[noreturn]] void absent_lane(int reader, int from) {
    int thread = current - current % warp_size + reader;
    report->offset = from;
    stop(ABSENT_LANE, (unsigned)thread, fibers[thread].code);
}
}  // namespace host

extern "C" {
// Stacks for the most fibers there can be, which all libraries share. Each ends in pages that nobody may touch.
char *host_stacks() {
    char *made = reserve(MOST_THREADS * STACK);
    for (unsigned i = 0; i < MOST_THREADS; i++) mprotect(made + i * STACK, GUARD, PROT_NONE);
    return made;
}

// Runs a kernel; *found, given as zeros, says what went wrong if anything did.
void host_launch(char *on_stacks, void (*function)(void **), void **values, const dim3 *grid, const dim3 *block,
                 size_t shared, int warp, unsigned seed, int check, const Memory *arrays, int n_arrays, Report *found) {
    stacks = on_stacks, kernel = function, arguments = values, gridDim = *grid, blockDim = *block;
    warp_size = warp, random_state = seed, checked = check, report = found;
    unsigned threads = block->x * block->y * block->z, blocks = grid->x * grid->y * grid->z;
    dynamic.resize(shared + 127);
    Address begin = (Address)__start_shared_memory, end = (Address)__stop_shared_memory;
    Address more = (Address)host::dynamic_shared();
    std::vector<uint8_t> states(end - begin + shared);
    memories.assign(arrays, arrays + n_arrays);
    memories.push_back({begin, end, states.data(), nullptr, STATIC_SHARED});
    memories.push_back({more, more + shared, states.data() + (end - begin), nullptr, DYNAMIC_SHARED});
    size_t bytes = 0;
    if (checked)
        for (auto &m : memories) bytes += m.end - m.begin;
    Cell *cells = (Cell *)reserve((bytes + 1) * sizeof(Cell)), *next = cells;
    for (auto &m : memories) m.cells = next, next += m.end - m.begin;

    getcontext(&start);
    fibers.assign(threads, Fiber());
    warps.resize((threads + warp - 1) / warp);
    published.assign(blocks, {0, -1});
    for (unsigned i : shuffled(blocks)) {
        block_number = i;
        blockIdx = index_of(i, gridDim);
        if (!run_block()) break;
    }
    munmap(cells, (bytes + 1) * sizeof(Cell));
}

#define ACCESS(n)                                                                            \
    void __tsan_read##n(void *p) { access((Address)p, n, READ, n, CALLER); }                 \
    void __tsan_write##n(void *p) { access((Address)p, n, WRITE, n, CALLER); }               \
    void __tsan_unaligned_read##n(void *p) { access((Address)p, n, READ, 1, CALLER); }       \
    void __tsan_unaligned_write##n(void *p) { access((Address)p, n, WRITE, 1, CALLER); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *p, size_t n) { access((Address)p, n, READ, 1, CALLER); }
void __tsan_write_range(void *p, size_t n) { access((Address)p, n, WRITE, 1, CALLER); }
#ifdef __clang__  // makes the copy of a structure a call of one of these; from its release 16 on they have other names
void *memmove(void *to, const void *from, size_t n) {
    if ((Address)__builtin_frame_address(0) - (Address)stacks < MOST_THREADS * STACK) {  // the kernel's own
        access((Address)from, n, READ, 1, CALLER);
        access((Address)to, n, WRITE, 1, CALLER);
    }
    auto there = (volatile char *)to;  // or the loop would become a call of memmove
    for (size_t i = 0; i < n; i++) {
        size_t at = to < from ? i : n - 1 - i;
        there[at] = ((const char *)from)[at];
    }
    return to;
}
#define SAME __attribute__((alias("memmove")))
void *memcpy(void *, const void *, size_t) SAME;
void *__tsan_memcpy(void *, const void *, size_t) SAME;
void *__tsan_memmove(void *, const void *, size_t) SAME;
#endif
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

// -fsanitize=bounds: an index beyond an array of known size, in registers or shared memory.
void __ubsan_handle_out_of_bounds(void *, void *index) {
    if (!checked) return;
    report->offset = (Address)index >> 32 ? (long long)index : (int)(Address)index;  // clang does not extend the sign
    stop(ARRAY_INDEX, (unsigned)current, CALLER);
}
}
