/* Appended to a rendered library: a pool of 12 experts of 3 runs within 7 runs, read from a memory file per expert; every one
 * is used in turn, often, and compared with what its file holds. Exit status: 0, or which check failed. */
#define SF_CHECK_EXPERTS 12u
#define SF_CHECK_BYTES (2u * 4096u + 100u)

static uint8_t sf_check_byte(uint32_t e, uint64_t at) { return (uint8_t)(e * 31u + at * 7u + (at >> 8)); }

static int sf_check_same(void *pool, uint32_t e) {
  const uint8_t *slot = sf_pool_slot(pool, e);
  for (uint64_t i = 0; i < SF_CHECK_BYTES; i++)
    if (slot[i] != sf_check_byte(e, i)) return 1;
  return 0;
}

static int sf_check_pool(void) {
  static uint8_t data[SF_CHECK_BYTES], key[sizeof(sf_tag_key)];
  static sf_pool_expert experts[SF_CHECK_EXPERTS];
  for (uint32_t i = 0; i < sizeof(key); i++) key[i] = sf_check_byte(99, i);
  for (uint32_t e = 0; e < SF_CHECK_EXPERTS; e++) {
    const int64_t fd = sf_system(SF_CHECK_MEMFD, (int64_t)"e", 0, 0, 0, 0, 0);
    if (fd < 0) return 10;
    for (uint64_t i = 0; i < SF_CHECK_BYTES; i++) data[i] = sf_check_byte(e, i);
    if (sf_system(SF_WRITE, fd, (int64_t)data, SF_CHECK_BYTES, 0, 0, 0) != SF_CHECK_BYTES) return 11;
    experts[e] = (sf_pool_expert){.bytes = SF_CHECK_BYTES, .file = (uint32_t)fd, .layer = e / 4, .group = SF_NONE};
  }
  const sf_pool_setup setup = {.struct_bytes = sizeof(setup), .experts = SF_CHECK_EXPERTS, .run_bytes = 4096, .runs = 7, .persistent_bytes = 64,
                               .expert = experts, .key = key};
  void *pool = NULL;
  if (sf_pool_open(&setup, &pool)) return 12;
  for (uint32_t e = 0; e < SF_CHECK_EXPERTS; e++) {
    if (sf_pool_bring(pool, e)) return 13;
    if (sf_check_same(pool, e)) return 14;
    if (sf_pool_trust(pool, e, 1)) return 15;
  }
  for (uint32_t step = 0; step < 200; step++) {
    const uint32_t e = step * 5 % SF_CHECK_EXPERTS;
    sf_pool_pass(pool);
    if (sf_pool_chose(pool, &e, 1) || sf_pool_touch(pool, e)) return 16;
    if (sf_check_same(pool, e)) return 17;
  }
  sf_pool_settle(pool);
  sf_pool_counts counts = {.struct_bytes = sizeof(counts)};
  if (sf_pool_read_counts(pool, &counts)) return 18;
  if (counts.committed_bytes != 6 * 4096 || !counts.evictions || !(counts.moved || counts.returned)) return 19;
  const uint8_t other = 1;
  if (sf_system(SF_CHECK_PWRITE, experts[0].file, (int64_t)&other, 1, 5, 0, 0) != 1) return 20;
  for (uint32_t e = 4; e < 8; e++) {
    sf_pool_pass(pool);
    if (sf_pool_touch(pool, e)) return 21;
    sf_pool_settle(pool);
  }
  if (sf_pool_touch(pool, 0) != SF_Status_EXPERT_ABSENT) return 22;
  if (sf_pool_close(pool)) return 23;
  return counts.moved ? 0 : 1; /* 1: right, but runs are returned and taken anew */
}

__attribute__((used, noreturn)) void sf_check_main(void);
void sf_check_main(void) {
  sf_system(SF_EXIT_GROUP, sf_check_pool(), 0, 0, 0, 0, 0);
  __builtin_unreachable();
}
