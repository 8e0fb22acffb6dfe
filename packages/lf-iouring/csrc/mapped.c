#define _GNU_SOURCE
#include "mapped.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { REGION_PAGES = 512, WORD = 64 };

/* Initial-exec: a handler must not be the first to allocate a thread's copy. */
static _Thread_local __attribute__((tls_model("initial-exec"))) sigjmp_buf *volatile guard;
static struct sigaction before;
static int install_error;

static void on_bus(int number, siginfo_t *info, void *context) {
  if (guard != NULL) siglongjmp(*guard, 1);
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    sigaction(SIGBUS, &before, NULL); /* the faulting instruction runs again, and the default ends the process */
    if (info->si_code <= 0) raise(number);
  }
}

static void install(void) {
  struct sigaction ours = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
  sigemptyset(&ours.sa_mask);
  install_error = sigaction(SIGBUS, &ours, &before) < 0 ? -errno : 0;
}

int lf_bus_guard(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, install);
  return install_error;
}

int lf_bus_guarded(void) {
  struct sigaction now;
  sigset_t blocked;
  return sigaction(SIGBUS, NULL, &now) == 0 && now.sa_sigaction == on_bus &&
         pthread_sigmask(SIG_SETMASK, NULL, &blocked) == 0 && !sigismember(&blocked, SIGBUS);
}

static uint64_t page_bytes(void) {
  static _Atomic uint64_t known;
  uint64_t bytes = atomic_load_explicit(&known, memory_order_relaxed);
  if (bytes == 0) {
    bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    atomic_store_explicit(&known, bytes, memory_order_relaxed);
  }
  return bytes;
}

/* Some kernels say of every page that it is in memory. */
static int kernel_tells(void) {
  unsigned char found = 1;
  void *untouched = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (untouched == MAP_FAILED) return 0;
  int asked = mincore(untouched, page_bytes(), &found) == 0;
  munmap(untouched, page_bytes());
  return asked && !(found & 1);
}

/* And all since 5.2 say it of a file that is not ours and that we may not write: who reads what is not our business. */
static int may_ask(int fd, const struct stat *file) {
  char name[32];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  return (file->st_uid == geteuid() || faccessat(AT_FDCWD, name, W_OK, AT_EACCESS) == 0) && kernel_tells();
}

int lf_map_open(lf_map *map, int fd) {
  struct stat file;
  memset(map, 0, sizeof *map);
  if (fstat(fd, &file) < 0) return -errno;
  if (file.st_size == 0) return 0;
  uint64_t pages = ((uint64_t)file.st_size + page_bytes() - 1) / page_bytes();
  void *base = mmap(NULL, (size_t)file.st_size, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return -errno;
  map->base = base;
  map->bytes = (uint64_t)file.st_size;
  map->resident = calloc(pages / WORD + 1, sizeof *map->resident);
  int ask = may_ask(fd, &file);
  if (ask) map->asked = calloc(pages / REGION_PAGES + 1, sizeof *map->asked);
  if (map->resident != NULL && (map->asked != NULL || !ask)) return 0;
  lf_map_close(map);
  return -ENOMEM;
}

void lf_map_close(lf_map *map) {
  if (map->base != NULL) munmap((void *)(uintptr_t)map->base, (size_t)map->bytes);
  free((void *)map->resident);
  free((void *)map->asked);
  memset(map, 0, sizeof *map);
}

static void mark(lf_map *map, uint64_t page) {
  atomic_fetch_or_explicit(&map->resident[page / WORD], (uint64_t)1 << page % WORD, memory_order_relaxed);
}

static int is_marked(const lf_map *map, uint64_t page) {
  return atomic_load_explicit(&map->resident[page / WORD], memory_order_relaxed) >> page % WORD & 1;
}

/* Asks the kernel once about all pages around one. */
static void ask(lf_map *map, uint64_t page) {
  unsigned char found[REGION_PAGES];
  uint64_t region = page / REGION_PAGES, first = region * REGION_PAGES * page_bytes();
  if (map->asked == NULL || atomic_exchange_explicit(&map->asked[region], 1, memory_order_relaxed)) return;
  uint64_t bytes = map->bytes - first, most = REGION_PAGES * page_bytes();
  if (bytes > most) bytes = most;
  if (mincore((void *)(uintptr_t)(map->base + first), (size_t)bytes, found) < 0) return;
  for (uint64_t i = 0; i * page_bytes() < bytes; i++) {
    if (found[i] & 1) mark(map, region * REGION_PAGES + i);
  }
}

static int all_marked(lf_map *map, uint64_t offset, uint64_t bytes) {
  for (uint64_t page = offset / page_bytes(); page <= (offset + bytes - 1) / page_bytes(); page++) {
    if (is_marked(map, page)) continue;
    ask(map, page);
    if (!is_marked(map, page)) return 0;
  }
  return 1;
}

int lf_map_copy(lf_map *map, uint8_t *dst, uint64_t offset, uint64_t bytes) {
  if (bytes == 0 || offset > map->bytes || bytes > map->bytes - offset || !all_marked(map, offset, bytes)) return 0;
  sigjmp_buf here;
  int copied = sigsetjmp(here, 0) == 0;
  if (copied) {
    guard = &here;
    memcpy(dst, map->base + offset, bytes);
  }
  guard = NULL;
  return copied;
}

void lf_map_seen(lf_map *map, uint64_t offset, uint64_t bytes) {
  if (bytes == 0 || offset > map->bytes || bytes > map->bytes - offset) return;
  for (uint64_t page = offset / page_bytes(); page <= (offset + bytes - 1) / page_bytes(); page++) mark(map, page);
}
