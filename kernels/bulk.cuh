// A block's job by bulk copies: tile by tile through shared memory, several under way at once, so
// that few blocks fill a link.
//
//   load a tile of each source -> combine them in shared memory -> store to each destination
//
// All workers of a crew call it. A stage holds a tile of each source. The last warp's first thread
// starts all copies; the others combine, and tell it by another landing what is combined. While a
// stage is combined, those behind it are being loaded and those before it stored; a stage is loaded
// again when its stores have read it. What is in flight hides the link's latency: with 8 blocks of
// 64 KiB each, 3 µs.
//
// A load always lands, be the peer's process alive or not, so waiting for it needs no deadline.
#pragma once

#include "fifo.cuh"
#include "jobs.cuh"

namespace collectives::device {

inline constexpr int kMostStages = 12;

struct BulkLandings {
  Landing loaded[kMostStages], combined[kMostStages];
};

// Made for each of the accumulators whose speed counts; void: one source, which is copied.
template <class A>
class BulkJob {
 public:
  __device__ BulkJob(const Job& job, const Arithmetic& arithmetic, BulkLandings& landings)
      : job_(job),
        arithmetic_(arithmetic),
        landings_(landings),
        tile_(tile_of(job.nsrc)),
        stages_(min(kMostStages, kBulkBytes / (job.nsrc * static_cast<int>(tile_)))),
        whole_(job.bytes / 16 * 16),
        tiles_(static_cast<u32>((whole_ + tile_ - 1) / tile_)) {}

  __device__ void run() {
    if (threadIdx.x == kCombining) {
      for (int i = 0; i < stages_; ++i) {
        open_landing(&landings_.loaded[i], 1);
        open_landing(&landings_.combined[i], kCombining / 32);
      }
      bulk_after_all();
    }
    named_barrier(kWorkers, kThreads);
    if (threadIdx.x < kCombining) {
      if constexpr (kReduces) combine();
    } else if (threadIdx.x == kCombining) {
      copy();
    }
    rest();
  }

 private:
  static constexpr bool kReduces = !__is_same(A, void);
  static constexpr int kCombining = kThreads - 32;  // threads
  // Stages whose stores may still be reading when the next loads begin.
  static constexpr int kStoring = 2;

  // Goes through the stages in turn.
  struct Turn {
    int stages, stage = 0;
    u32 parity = 0;
    __device__ void next() {
      if (++stage < stages) return;
      stage = 0;
      parity ^= 1;
    }
  };

  __device__ void copy() {
    Landing* const ready = kReduces ? landings_.combined : landings_.loaded;
    Turn loads{stages_}, stores{stages_};
    const int ahead = stages_ - kStoring;
    u32 loading = 0;
    const auto load_next = [&] {
      if (loading < tiles_) load(loading++, loads.stage);
      loads.next();
    };
    for (int i = 0; i < ahead; ++i) load_next();
    for (u32 tile = 0; tile < tiles_; ++tile, stores.next()) {
      while (!has_landed(&ready[stores.stage], stores.parity)) poll_again();
      for (int d = 0; d < job_.ndst; ++d)
        bulk_store(job_.dst[d] + u64(tile) * tile_, at(stores.stage, 0), bytes_of(tile));
      end_bulk_group();
      wait_bulk_read<kStoring>();
      load_next();
    }
    wait_bulk_written();
  }

  __device__ static u32 tile_of(int sources) {
    return static_cast<u32>(sources <= 2   ? kBulkTile
                            : sources <= 6 ? kBulkTile / 2
                                           : kBulkTile / 4);
  }
  __device__ u32 bytes_of(u32 tile) const {
    return static_cast<u32>(min(static_cast<u64>(tile_), whole_ - u64(tile) * tile_));
  }
  __device__ unsigned char* at(int stage, int source) const {
    return bulk_memory() + (stage * job_.nsrc + source) * tile_;
  }
  __device__ void load(u32 tile, int stage) {
    Landing* const landing = &landings_.loaded[stage];
    expect_bytes(landing, static_cast<u32>(job_.nsrc) * bytes_of(tile));
    for (int s = 0; s < job_.nsrc; ++s)
      bulk_load(at(stage, s), job_.src[s] + u64(tile) * tile_, bytes_of(tile), landing);
  }

  __device__ void combine() {
    Turn turn{stages_};
    for (u32 tile = 0; tile < tiles_; ++tile, turn.next()) {
      while (!has_landed(&landings_.loaded[turn.stage], turn.parity)) poll_again();
      const u32 packs = bytes_of(tile) / 16;
      u32 i = threadIdx.x;
      for (; i + kCombining < packs; i += 2 * kCombining) combine_packs<2>(turn.stage, i);
      if (i < packs) combine_packs<1>(turn.stage, i);
      bulk_after_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(&landings_.combined[turn.stage]);
    }
  }
  // Over the first source.
  template <int kPacks>
  __device__ void combine_packs(int stage, u32 first) {
    PackSum<A> sum[kPacks];
    ulonglong2 raw[kPacks];
    ulonglong2* const into = reinterpret_cast<ulonglong2*>(at(stage, 0)) + first;
    for (int s = 0; s < job_.nsrc; ++s) {
      const ulonglong2* from = reinterpret_cast<const ulonglong2*>(at(stage, s)) + first;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) raw[k] = from[k * kCombining];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) s == 0 ? sum[k].load(raw[k]) : sum[k].add(raw[k]);
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) into[k * kCombining] = sum[k].finish(job_);
  }
  // Less than 16 bytes.
  __device__ void rest() {
    if constexpr (kReduces) {
      reduce_elements<A>(job_, arithmetic_, whole_);
    } else if (const u64 i = whole_ + threadIdx.x; i < job_.bytes) {
      for (int d = 0; d < job_.ndst; ++d) job_.dst[d][i] = job_.src[0][i];
    }
  }

  const Job& job_;
  const Arithmetic& arithmetic_;
  BulkLandings& landings_;
  u32 tile_;
  int stages_;
  u64 whole_;
  u32 tiles_;
};

template <class A>
__device__ __noinline__ void bulk_job(const Job& job, const Arithmetic& arithmetic,
                                      BulkLandings& landings) {
  BulkJob<A>(job, arithmetic, landings).run();
}

}  // namespace collectives::device
