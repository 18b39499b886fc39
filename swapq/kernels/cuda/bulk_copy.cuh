// Copies from global to shared memory that one instruction starts, and the barrier that counts their bytes (sm_90).
#pragma once

struct Arrival { u64 barrier; };

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

DEVICE void arrival_init(Arrival* a, u32 arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(a)), "r"(arrivals));
    asm volatile("fence.mbarrier_init.release.cluster;");
}
DEVICE void arrival_arrive(Arrival* a) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(a)) : "memory");
}
DEVICE void arrival_expect(Arrival* a, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(a)), "r"(bytes) : "memory");
}
DEVICE void arrival_wait(Arrival* a, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(a)), "r"(phase) : "memory");
}
// Sixteen-byte units, aligned to sixteen bytes on both sides.
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, Arrival* a) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(a))
                 : "memory");
}
// To the level-2 cache alone.
DEVICE void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// One unit, started by each thread for itself.
DEVICE void copy_unit(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// The thread arrives when the units it has started are there. Counted among the barrier's arrivals.
DEVICE void arrival_arrive_after_copies(Arrival* a) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(a)) : "memory");
}
DEVICE void copy_float(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// All that the thread has started is there.
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
