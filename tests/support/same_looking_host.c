/* For LD_PRELOAD. Makes a process believe that it is in the kernel's initial namespaces, whose inode
 * numbers are the same on all machines. Two hosts of netns.py then look like two clones of one
 * machine: the same boot id, the same namespaces, and nothing shared. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char* const kPid = "/proc/self/ns/pid";
static const char* const kIpc = "/proc/self/ns/ipc";
static const unsigned kFirstPid = 0xEFFFFFFCu;
static const unsigned kFirstIpc = 0xEFFFFFFFu;

static int disguise(int result, const char* path, struct stat* info) {
  if (result == 0 && strcmp(path, kPid) == 0) {
    info->st_ino = kFirstPid;
  } else if (result == 0 && strcmp(path, kIpc) == 0) {
    info->st_ino = kFirstIpc;
  }
  return result;
}

/* Called by our extension. */
int stat(const char* path, struct stat* info) {
  int (*real)(const char*, struct stat*) = dlsym(RTLD_NEXT, "stat");
  return disguise(real(path, info), path, info);
}

/* Called by Python. On 64-bit machines struct stat64 is struct stat. */
int stat64(const char* path, struct stat64* info) {
  return stat(path, (struct stat*)info);
}

/* Called by UCX. */
ssize_t readlink(const char* path, char* target, size_t size) {
  ssize_t (*real)(const char*, char*, size_t) = dlsym(RTLD_NEXT, "readlink");
  char text[32];
  if (strcmp(path, kPid) == 0) {
    snprintf(text, sizeof(text), "pid:[%u]", kFirstPid);
  } else if (strcmp(path, kIpc) == 0) {
    snprintf(text, sizeof(text), "ipc:[%u]", kFirstIpc);
  } else {
    return real(path, target, size);
  }
  const size_t length = strlen(text) < size ? strlen(text) : size;
  memcpy(target, text, length);
  return (ssize_t)length;
}
