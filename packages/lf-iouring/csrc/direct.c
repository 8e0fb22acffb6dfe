#define _GNU_SOURCE
#include "direct.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

/* From <linux/magic.h>. Both accept O_DIRECT on newer kernels, and copy from the page cache all the same. */
#define TMPFS 0x01021994
#define RAMFS 0x858458f6
/* At 1 MiB a read, 64 MiB keep 63 of them in flight. */
#define MAX_BOUNCE ((size_t)64 << 20)
/* Blocks larger than pages are at most 64 KiB; network file systems name their transfer size here. */
#define MAX_SINK_UNIT (64u << 10)
#define HUGE_PAGE ((size_t)2 << 20)

static int in_memory(int fd) {
  struct statfs fs;
  if (fstatfs(fd, &fs) < 0) return 0;
  return (uint32_t)fs.f_type == TMPFS || (uint32_t)fs.f_type == RAMFS;
}

/* A file system may accept the flag and refuse every read. */
static int refuses_reads(int fd) {
  void *page;
  if (posix_memalign(&page, LF_UNIT, LF_UNIT) != 0) return ENOMEM;
  int error = pread(fd, page, LF_UNIT, 0) < 0 ? errno : 0;
  free(page);
  return error;
}

int32_t lf_direct_open(int32_t fd) {
  char name[32];
  if (in_memory(fd)) return -EOPNOTSUPP;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd); /* also finds a file that has no name any more */
  int direct = open(name, O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (direct < 0) return -errno;
  int error = refuses_reads(direct);
  if (error == 0) return direct;
  close(direct);
  return -error;
}

int32_t lf_direct_sink(int32_t fd, uint32_t *unit) {
  char name[32];
  struct statfs fs;
  if (in_memory(fd)) return -EOPNOTSUPP;
  long block = fstatfs(fd, &fs) == 0 ? (long)fs.f_bsize : 0, page = sysconf(_SC_PAGESIZE);
  if (block < page) block = page;
  *unit = block < LF_UNIT ? LF_UNIT : (uint32_t)block;
  if (*unit > MAX_SINK_UNIT || *unit % LF_UNIT != 0) return -EOPNOTSUPP;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  int direct = open(name, O_WRONLY | O_DIRECT | O_CLOEXEC);
  return direct < 0 ? -errno : direct;
}

int32_t lf_reserve(int32_t fd, uint64_t bytes) { return fallocate(fd, 0, 0, (off_t)bytes) < 0 ? -errno : 0; }

static void unmap(lf_files *files) {
  for (uint32_t i = 0; files->maps != NULL && i < files->count; i++) lf_map_close(&files->maps[i]);
  free(files->maps);
  files->maps = NULL;
}

int lf_files_open(lf_files *files, const lf_options *options) {
  memset(files, 0, sizeof *files);
  if (options->files == 0) return 0;
  uint32_t all = options->direct ? 2 * options->files : options->files;
  files->fds = malloc(all * sizeof *files->fds);
  for (uint32_t i = 0; i < options->files; i++) {
    if ((uint32_t)options->fds[i] >= files->known) files->known = (uint32_t)options->fds[i] + 1;
  }
  files->places = malloc(files->known * sizeof *files->places);
  if (files->fds == NULL || files->places == NULL) {
    lf_files_close(files);
    return -ENOMEM;
  }
  memcpy(files->fds, options->fds, all * sizeof *files->fds);
  memset(files->places, 0xFF, files->known * sizeof *files->places);
  for (uint32_t i = 0; i < options->files; i++) files->places[options->fds[i]] = (int32_t)i;
  files->count = options->files;
  files->direct = options->direct;
  return 0;
}

int lf_files_map(lf_files *files) {
  files->maps = calloc(files->count, sizeof *files->maps);
  int rc = files->maps == NULL ? -ENOMEM : lf_bus_guard();
  for (uint32_t i = 0; i < files->count && rc == 0; i++) rc = lf_map_open(&files->maps[i], files->fds[i]);
  if (rc < 0) unmap(files);
  return rc;
}

void lf_files_close(lf_files *files) {
  unmap(files);
  free(files->fds);
  free(files->places);
  memset(files, 0, sizeof *files);
}

uint32_t lf_bounce_open(lf_bounce *bounce, uint32_t places, uint32_t span) {
  memset(bounce, 0, sizeof *bounce);
  /* An extent of any alignment touches at most one unit more than its length needs. */
  uint32_t stride = lf_round_up(span, LF_UNIT) + LF_UNIT;
  if (places > MAX_BOUNCE / stride) places = (uint32_t)(MAX_BOUNCE / stride);
  if (places == 0) places = 1;
  size_t bytes = (size_t)places * stride;
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  bounce->stack = malloc(places * sizeof *bounce->stack);
  if (memory == MAP_FAILED || bounce->stack == NULL) {
    if (memory != MAP_FAILED) munmap(memory, bytes);
    free(bounce->stack);
    bounce->stack = NULL;
    return 0;
  }
  madvise(memory, bytes, MADV_DONTFORK);
  if (bytes >= HUGE_PAGE) madvise(memory, bytes, MADV_HUGEPAGE); /* fewer segments for the device */
  bounce->memory = memory;
  bounce->bytes = bytes;
  bounce->stride = stride;
  bounce->spare = places;
  for (uint32_t i = 0; i < places; i++) bounce->stack[i] = i;
  return places;
}

void lf_bounce_close(lf_bounce *bounce) {
  if (bounce->memory != NULL) munmap(bounce->memory, bounce->bytes);
  free(bounce->stack);
  memset(bounce, 0, sizeof *bounce);
}

int32_t lf_bounce_take(lf_bounce *bounce) {
  return bounce->spare > 0 ? (int32_t)bounce->stack[--bounce->spare] : -1;
}

void lf_bounce_give(lf_bounce *bounce, int32_t place) {
  if (place >= 0) bounce->stack[bounce->spare++] = (uint32_t)place;
}
