-- After the manifest: drop stream and descriptions, keep mark and offsets for a while.
-- KEYS: meta frames offsets sources ctl claim
-- ARGV: epoch ttl_s checked, then, if checked is 1, "source:generation" and the sealed offset that the manifest covers
-- Answer: 1 done (now or by an earlier call), 0 not so
local meta, frames, offsets, sources, ctl, claim = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local known = redis.call('HMGET', meta, 'epoch', 'state')
if known[1] ~= ARGV[1] then return 0 end
if known[2] == 'archived' then return 1 end
if known[2] ~= 'drained' or redis.call('XLEN', frames) > 0 then return 0 end

local covered = {}
for i = 4, #ARGV, 2 do covered[ARGV[i]] = ARGV[i + 1] end
local all = redis.call('HGETALL', offsets)
local value, settle = {}, {}
for i = 1, #all, 2 do value[all[i]] = all[i + 1] end
local there = redis.call('EXISTS', frames)
for field, committed in pairs(value) do
  if string.sub(field, -2) ~= ':s' then
    if ARGV[3] == '1' and tonumber(covered[field] or '0') < tonumber(committed) then return 0 end
    if tonumber(value[field .. ':s'] or '0') < tonumber(committed) then
      if there == 0 then return 0 end
      settle[#settle + 1] = field
    end
  end
end

redis.call('DEL', frames, sources, claim)
for _, field in ipairs(settle) do redis.call('HSET', offsets, field .. ':s', value[field]) end
redis.call('HSET', meta, 'state', 'archived', 'pending', '0')
for _, key in ipairs({meta, offsets, ctl}) do redis.call('EXPIRE', key, ARGV[2]) end
return 1
