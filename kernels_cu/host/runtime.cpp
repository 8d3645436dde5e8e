// A GPU's grid on one CPU thread: the threads of a block are fibers, run one at a time until each waits or returns;
// blocks run one after another, in an order that a seed shuffles.
//
// With `checked` set every access of the kernel is looked at. The kernel is compiled with -fsanitize=thread and linked
// without that sanitizer's library, so its code calls __tsan_read4(address) and so on before each access: the functions
// of those names are here. Each byte of an array or of shared memory has a state (does it belong to the array, has it
// been initialised) and the last write and read, of which thread and when. Two accesses by different threads are in
// order when a barrier of the block lies between, or of the warp for threads of one; those of different blocks never are.
// A second access to a byte, unordered with the first, is a race if one of them writes and not both are atomic.
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <vector>

typedef unsigned long long Lanes;
typedef void (*Combine)(void **arrived, Lanes lanes);
typedef uintptr_t Address;

enum Finding { NONE, OUTSIDE, MISALIGNED, UNINITIALISED, RACE, BARRIER, LANES, UNREAD_LANE, ARRAY_INDEX };
enum State : uint8_t { PART = 1, INITIALISED = 2 };

extern "C" {
struct dim3 {
    unsigned x, y, z;
};
dim3 threadIdx, blockIdx, blockDim, gridDim;
__attribute__((weak)) extern char __start_shared_memory[], __stop_shared_memory[];

// An array of the caller's, or shared memory; state has a byte for each of its bytes.
struct Region {
    Address begin, end;
    uint8_t *state;
};

// What went wrong: the access, and the earlier one it is in conflict with. region is an index into the caller's arrays,
// -1 for shared memory, -2 for neither; offset is in bytes from its beginning.
struct Report {
    int finding, region;
    long long offset;
    int size, writes;
    dim3 block, thread, other_block, other_thread;
    Address code, other_code;  // where in the code, relative to the start of the library
    int other_writes;
    Lanes lanes, arrived;
};
extern const char __ehdr_start[];  // the linker's name for the start of the library
}

namespace {
// The last access to a byte. Where several are not in order with one another (reads, or atomics) `who` says whose they
// are: of one thread, of threads of one warp, of one block, or of several blocks.
enum Who : char { NOBODY, THREAD, WARP, BLOCK, GRID };
struct Access {
    unsigned block = 0, epoch = 0, warp_epoch = 0, code = 0;
    short thread = 0;
    bool atomic = false;
    Who who = NOBODY;
};
struct Cell {
    Access write, read;
};
struct Memory : Region {
    std::vector<Cell> cells;
    int number;
};
struct Fiber {
    jmp_buf registers;
    ucontext_t start;
    char *stack;
    enum { READY, AT_BARRIER, AT_COLLECTIVE, DONE } state;
    bool started;
    Address code;  // where it waits
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

const size_t STACK = 128 << 10;

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Memory> memories;
std::vector<char> dynamic;
jmp_buf scheduler;
int current, warp_size;
unsigned block_number, epoch;
bool checked;
Report *report;
void (*kernel)(void **);
void **arguments;

#define CALLER ((Address)__builtin_return_address(0) - (Address)__ehdr_start)

dim3 index_of(unsigned number, dim3 of) {
    return {number % of.x, number / of.x % of.y, number / of.x / of.y};
}

void yield() {
    if (!_setjmp(fibers[current].registers)) _longjmp(scheduler, 1);
}

[[noreturn]] void stop(Finding finding, Address code) {
    report->finding = finding;
    report->block = blockIdx;
    report->thread = threadIdx;
    report->code = code;
    _longjmp(scheduler, 2);
}

void run() {
    for (;;) {
        kernel(arguments);
        fibers[current].state = Fiber::DONE;
        yield();
    }
}

void make_fibers(unsigned n) {
    for (auto &f : fibers) munmap(f.stack, STACK);
    fibers = std::vector<Fiber>(n);
    for (auto &f : fibers) {
        f.stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack;
        f.start.uc_stack.ss_size = STACK;
        makecontext(&f.start, run, 0);
        f.state = Fiber::DONE;
        f.started = false;
    }
}

// Runs fiber i until it waits or returns; gives 2 if it stopped at a finding.
int resume(unsigned i) {
    int how = _setjmp(scheduler);
    if (how) return how;
    current = i;
    threadIdx = index_of(i, blockDim);
    if (fibers[i].started) _longjmp(fibers[i].registers, 1);
    fibers[i].started = true;
    setcontext(&fibers[i].start);
    return 2;
}

bool same_warp(const Access &a) { return a.thread / warp_size == current / warp_size; }

// Whether the earlier access a is not in order with one that the current thread makes now.
bool unordered(const Access &a, bool shared) {
    if (a.who == NOBODY) return false;
    if (a.block != block_number) return !shared;  // shared memory starts anew with each block
    if (a.who == GRID) return true;
    if (a.epoch != epoch || (a.who == THREAD && a.thread == current)) return false;
    return a.who == BLOCK || !same_warp(a) || a.warp_epoch == warps[current / warp_size].epoch;
}

// `a` becomes the access that the current thread makes now, together with those it is not in order with.
void note(Access &a, bool atomic, bool shared, Address code) {
    Who who = !unordered(a, shared)                        ? THREAD
              : a.block != block_number || a.who == GRID   ? GRID
              : a.who == BLOCK || !same_warp(a)            ? BLOCK
                                                           : WARP;
    a.block = block_number, a.epoch = epoch, a.warp_epoch = warps[current / warp_size].epoch;
    a.code = (unsigned)code, a.thread = (short)current, a.atomic = atomic, a.who = who;
}

[[noreturn]] void race(const Access &other, bool other_writes, Address code) {
    report->other_block = index_of(other.block, gridDim);
    report->other_thread = index_of(other.thread, blockDim);
    report->other_code = other.code;
    report->other_writes = other_writes;
    stop(RACE, code);
}

void access(Address address, int size, bool writes, bool atomic, Address code) {
    if (!checked) return;
    if (address - (Address)fibers[current].stack < STACK) return;
    report->region = -2;
    report->offset = (long long)address;
    report->size = size;
    report->writes = writes;
    Memory *m = nullptr;
    Address nearest = ~(Address)0;
    for (auto &candidate : memories) {
        if (address >= candidate.begin && address + size <= candidate.end) {
            m = &candidate;
            break;
        }
        // For the message: the region that the access lies nearest to.
        Address distance = address < candidate.begin ? candidate.begin - address : address - candidate.end;
        if (distance < nearest && distance < 1 << 20) {
            nearest = distance;
            report->region = candidate.number;
            report->offset = (long long)(address - candidate.begin);
        }
    }
    if (!m) stop(OUTSIDE, code);
    Address offset = address - m->begin;
    report->region = m->number;
    report->offset = (long long)offset;
    if (size <= 16 && !(size & (size - 1)) && address % size) stop(MISALIGNED, code);
    bool shared = m->number == -1;
    for (int i = 0; i < size; i++) {
        uint8_t &state = m->state[offset + i];
        if (!(state & PART)) stop(OUTSIDE, code);
        if (!writes && !(state & INITIALISED)) stop(UNINITIALISED, code);
        state |= INITIALISED;
        Cell &cell = m->cells[offset + i];
        if (!(cell.write.atomic && atomic) && unordered(cell.write, shared)) race(cell.write, true, code);
        if (writes && unordered(cell.read, shared)) race(cell.read, false, code);
        note(writes ? cell.write : cell.read, atomic, shared, code);
    }
}

// Why nothing moves: some thread waits for others that cannot come.
void stuck(unsigned threads) {
    for (unsigned i = 0; i < threads; i++) {
        Fiber &f = fibers[i];
        if (f.state != Fiber::AT_BARRIER && f.state != Fiber::AT_COLLECTIVE) continue;
        Warp &warp = warps[i / warp_size];
        report->finding = f.state == Fiber::AT_BARRIER ? BARRIER : LANES;
        report->block = blockIdx;
        report->thread = index_of(i, blockDim);
        report->code = f.code;
        report->lanes = f.state == Fiber::AT_COLLECTIVE ? warp.lane[i % warp_size].lanes : 0;
        report->arrived = warp.waiting;
        for (unsigned j = 0; j < threads; j++)
            if (fibers[j].state != f.state) {
                report->other_thread = index_of(j, blockDim);
                report->other_code = fibers[j].state == Fiber::DONE ? 0 : fibers[j].code;
                break;
            }
        return;
    }
}

bool run_block(unsigned threads, std::mt19937 &random) {
    static std::vector<unsigned> order;
    order.resize(threads);
    for (unsigned i = 0; i < threads; i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (auto &m : memories)
        if (m.number == -1) {
            memset((void *)m.begin, 0xff, m.end - m.begin);  // NaN in every floating type
            memset(m.state, PART, m.end - m.begin);
        }
    epoch = 0;
    for (auto &w : warps) w.epoch = 0, w.waiting = 0;
    for (auto &f : fibers) f.state = Fiber::READY;
    for (;;) {
        unsigned done = 0, waiting = 0, ran = 0;
        for (unsigned i : order) {
            if (fibers[i].state != Fiber::READY) continue;
            if (resume(i) == 2) return false;
            ran++;
        }
        for (unsigned i = 0; i < threads; i++) {
            done += fibers[i].state == Fiber::DONE;
            waiting += fibers[i].state == Fiber::AT_BARRIER;
        }
        if (done == threads) return true;
        if (waiting == threads) {
            epoch++;
            for (auto &f : fibers) f.state = Fiber::READY;
        } else if (!ran) {
            stuck(threads);
            return false;
        }
    }
}
}  // namespace

namespace host {
int lane() { return current % warp_size; }

void *dynamic_shared() { return (void *)(((Address)dynamic.data() + 127) & ~(Address)127); }

void sync_block() {
    fibers[current].state = Fiber::AT_BARRIER;
    fibers[current].code = CALLER;
    yield();
}

static void arrive(Lanes lanes, Combine combine, void *mine, Address code) {
    int lane = current % warp_size, first = current - lane;
    Warp &warp = warps[current / warp_size];
    fibers[current].code = code;
    if (!(lanes >> lane & 1)) {
        report->lanes = lanes, report->arrived = 1ull << lane;
        stop(LANES, code);
    }
    warp.lane[lane] = {lanes, combine, mine};
    warp.waiting |= 1ull << lane;
    bool all = (warp.waiting & lanes) == lanes;
    for (int i = 0; i < warp_size && all; i++)
        if (lanes >> i & 1) all = warp.lane[i].lanes == lanes && warp.lane[i].combine == combine;
    if (!all) {
        fibers[current].state = Fiber::AT_COLLECTIVE;
        yield();
        return;
    }
    void *arrived[64];
    for (int i = 0; i < warp_size; i++) arrived[i] = warp.lane[i].pointer;
    if (combine) combine(arrived, lanes);
    else warp.epoch++;
    warp.waiting &= ~lanes;
    for (int i = 0; i < warp_size; i++)
        if ((lanes >> i & 1) && i != lane) fibers[first + i].state = Fiber::READY;
}

void collective(Lanes lanes, Combine combine, void *mine) { arrive(lanes, combine, mine, CALLER); }

void sync_warp(Lanes lanes) { arrive(lanes, nullptr, nullptr, CALLER); }

void atomic_access(void *address, int size) { access((Address)address, size, true, true, CALLER); }

[[noreturn]] void unread_lane(int lane) {
    report->lanes = (Lanes)lane;
    stop(UNREAD_LANE, fibers[current].code);
}
}  // namespace host

extern "C" {
// Runs a kernel; 0 if all went well, else what was found, with the rest of it in *found.
int host_launch(void (*function)(void **), void **values, const dim3 *grid, const dim3 *block, size_t shared, int warp,
                unsigned seed, int check, const Region *regions, int n_regions, Report *found) {
    kernel = function, arguments = values, gridDim = *grid, blockDim = *block, warp_size = warp, checked = check;
    report = found;
    unsigned threads = block->x * block->y * block->z, blocks = grid->x * grid->y * grid->z;
    dynamic.assign(shared + 128, 0);
    std::vector<uint8_t> static_state(__stop_shared_memory - __start_shared_memory), dynamic_state(shared);
    memories.clear();
    auto add = [&](Region r, int number) {
        memories.emplace_back();
        (Region &)memories.back() = r;
        memories.back().number = number;
        if (checked) memories.back().cells.resize(r.end - r.begin);
    };
    Address d = (Address)host::dynamic_shared();
    add({(Address)__start_shared_memory, (Address)__stop_shared_memory, static_state.data()}, -1);
    add({d, d + shared, dynamic_state.data()}, -1);
    for (int i = 0; i < n_regions; i++) add(regions[i], i);
    if (fibers.size() != threads) make_fibers(threads);
    for (auto &f : fibers)
        if (f.state != Fiber::DONE) {  // an earlier launch stopped in the middle
            make_fibers(threads);
            break;
        }
    warps.resize((threads + warp - 1) / warp);
    std::mt19937 random(seed);
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (unsigned i : order) {
        block_number = i;
        blockIdx = index_of(i, gridDim);
        if (!run_block(threads, random)) {
            for (auto &f : fibers) f.state = Fiber::READY;
            break;
        }
    }
    return report->finding;
}

#define ACCESS(size)                                                                                           \
    void __tsan_read##size(void *p) { access((Address)p, size, false, false, CALLER); }                          \
    void __tsan_write##size(void *p) { access((Address)p, size, true, false, CALLER); }                          \
    void __tsan_unaligned_read##size(void *p) { access((Address)p, size, false, false, CALLER); }                \
    void __tsan_unaligned_write##size(void *p) { access((Address)p, size, true, false, CALLER); }                \
    void __tsan_volatile_read##size(void *p) { access((Address)p, size, false, false, CALLER); }                 \
    void __tsan_volatile_write##size(void *p) { access((Address)p, size, true, false, CALLER); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *p, size_t n) { access((Address)p, (int)n, false, false, CALLER); }
void __tsan_write_range(void *p, size_t n) { access((Address)p, (int)n, true, false, CALLER); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}

// -fsanitize=bounds: an index beyond an array of known size, in registers or shared memory.
void __ubsan_handle_out_of_bounds(void *, void *index) {
    if (!checked) return;
    report->offset = (long long)index;
    stop(ARRAY_INDEX, CALLER);
}
}
