// Clusters of blocks: the intrinsics that NVRTC knows for sm_90 and later.
#pragma once

static __forceinline__ unsigned __clusterRelativeBlockRank() { return emu_cluster_rank(); }
static __forceinline__ EmuDim __clusterDim() { return emu_cluster_dim(); }
static __forceinline__ unsigned __clusterSizeInBlocks() {
  const EmuDim size = emu_cluster_dim();
  return size.x * size.y * size.z;
}
static __forceinline__ EmuDim __clusterIdx() {
  const EmuDim block = emu_block_index(), size = emu_cluster_dim();
  return {block.x / size.x, block.y / size.y, block.z / size.z};
}
static __forceinline__ EmuDim __clusterRelativeBlockIdx() {
  const EmuDim block = emu_block_index(), size = emu_cluster_dim();
  return {block.x % size.x, block.y % size.y, block.z % size.z};
}
static __forceinline__ EmuDim __clusterGridDimInClusters() {
  const EmuDim grid = emu_grid_dim(), size = emu_cluster_dim();
  return {grid.x / size.x, grid.y / size.y, grid.z / size.z};
}
#define __cluster_barrier_arrive() emu_cluster_arrive()
#define __cluster_barrier_wait() emu_cluster_wait()
#define __cluster_map_shared_rank(address, rank) emu_map_shared(address, rank)
